"""The requests for embeddings, scores and labels of one engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import attrs
import numpy as np
import numpy.typing as npt
import trio

from trioserve.config import EngineConfig
from trioserve.model_files.decoder_embedding import DecoderEmbedding
from trioserve.model_files.encoder_config import EncoderConfig
from trioserve.model_files.encoder_files import ModelTask
from trioserve.observability.metrics import Metrics
from trioserve.observability.tracing import EndedTexts
from trioserve.pooling.batcher import Batcher
from trioserve.pooling.columns import Columns
from trioserve.pooling.decoders import PoolPrompt, check_pooling, pool_prompts
from trioserve.pooling.inputs import Inputs, Item, TextEncoder, as_items
from trioserve.pooling.labels import Text, label_params, label_prompts, label_scores
from trioserve.pooling.open_requests import OpenRequests
from trioserve.pooling.results import (
    Classifications,
    Embeddings,
    LabelScores,
    Scores,
    Shape,
    activated,
    probabilities_of,
    similarities,
)
from trioserve.pooling.sender import EncodeArguments
from trioserve.pooling.together import all_together
from trioserve.protocol.errors import InvalidRequest, TrioserveError
from trioserve.requests.deadline import Deadline
from trioserve.requests.generation import Completion, Usage
from trioserve.requests.request import Prompt, TokensPrompt

Pair = tuple[str, str]
Floats = npt.NDArray[np.float32]
Compute = Callable[[Columns, str], Awaitable[Floats]]
"""Computes the texts of a tenant: :meth:`trioserve.pooling.batcher.Batcher.compute`, in this or
another process.
"""

_PURPOSES: dict[ModelTask, str] = {
    "generate": "generates text (Engine.generate, /v1/chat/completions)",
    "embed": "embeds texts (Engine.embed, /v1/embeddings)",
    "classify": "classifies texts (Engine.classify, /classify)",
}

_LABEL_NAMES = {"prompt": "items", "logprob_token_ids": "label_token_ids"}
"""Names of a completion's arguments in requests for label scores."""


@attrs.frozen(eq=False, kw_only=True)
class Encoding:
    """The encoding of texts: ``encoder`` turns them into ids, and ``compute`` those into vectors.

    ``batcher`` is the batcher behind ``compute``, if it is in this process.
    """

    encoder: TextEncoder
    compute: Compute
    batcher: Batcher | None = None


@attrs.define(eq=False, kw_only=True)
class Pooling:
    """The requests of one engine for vectors, scores and labels.

    Args:
        task: Task of the model.
        model_name: Name of the model.
        config: Options, among them the default timeout.
        metrics: Counts requests.
        check_open: Raises if no request may enter.
        encoding: Encoding of texts, if the model is an encoder.
        embedding: Rules for vectors, if the model is a decoder.
        pool_prompt: Computes a prompt on a decoder.
        complete: :meth:`trioserve.Engine.complete`.
        open: Open requests.
        on_end: Called with each request served by an encoder, when it has ended.
    """

    task: ModelTask
    model_name: str
    config: EngineConfig
    metrics: Metrics
    check_open: Callable[[], None]
    encoding: Encoding | None
    embedding: DecoderEmbedding
    pool_prompt: PoolPrompt
    complete: Callable[..., Awaitable[Completion]]
    open: OpenRequests
    on_end: Callable[[EndedTexts], None] = lambda _: None

    @property
    def purpose(self) -> str:
        """Task of the model and how to use it, as a clause after the model's name."""
        labels = () if self.encoding is None else self.encoding.encoder.config.labels
        if self.task == "classify" and len(labels) == 1:
            return "scores pairs of texts (Engine.score, /score, /rerank)"
        return _PURPOSES[self.task]

    def refusal(self, wanted: str) -> InvalidRequest:
        """Return the error for a task that the model doesn't do, such as ``give embeddings``."""
        message = f"the model {self.model_name} doesn't {wanted}: it {self.purpose}"
        return InvalidRequest(message, param="model", code="unsupported_task")

    async def embed(
        self,
        inputs: Inputs,
        *,
        dimensions: int | None,
        normalize: bool | None,
        pooling: str | None,
        truncate_prompt_tokens: int | None,
        sender: EncodeArguments,
        cache_salt: str,
        adapter: str,
    ) -> Embeddings:
        """Return embeddings: see :meth:`trioserve.engine.engine.Engine.embed`."""
        items = as_items(inputs)
        if any(isinstance(item, tuple) for item in items):
            raise InvalidRequest("an embedding is one text's, not a pair's", param="input")
        if self.encoding is None:
            vectors, lengths = await self._prompt_vectors(
                items, truncate_prompt_tokens, sender, pooling, cache_salt, adapter
            )
            if normalize is None and self.embedding.normalize:
                normalize = True
            shape = Shape(dimensions, normalize, are_normalized=False)
            shape.check(vectors.shape[1])
            return Embeddings(shape.of(vectors), _usage(lengths), tuple(lengths))
        config = self._config("embed", "give embeddings")
        if adapter:
            raise InvalidRequest("an encoder has no adapters", param="adapter")
        if pooling is not None and pooling != config.pooling:
            raise InvalidRequest(
                f"pooling is this model's own, {config.pooling}: leave it out", param="pooling"
            )
        wanted = Shape(dimensions, normalize, config.normalize)
        wanted.check(config.num_outputs)
        vectors, lengths = await self._vectors(items, truncate_prompt_tokens, sender)
        return Embeddings(wanted.of(vectors), _usage(lengths), tuple(lengths))

    async def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None,
        sender: EncodeArguments,
    ) -> Scores:
        """Return scores: see :meth:`trioserve.engine.engine.Engine.score`."""
        pairs = _pairs(queries, documents)
        config = None if self.encoding is None else self.encoding.encoder.config
        if self.task == "generate" or (config is not None and len(config.labels) > 1):
            raise self.refusal("score pairs of texts")
        if config is not None and config.labels:
            vectors, lengths = await self._vectors(pairs, truncate_prompt_tokens, sender)
            return Scores(activated(vectors, config.score_activation)[:, 0], _usage(lengths))
        place = {query: index for index, query in enumerate(dict.fromkeys(q for q, _ in pairs))}
        texts = [*place, *(document for _, document in pairs)]
        vectors, lengths = await self._embeddings(texts, truncate_prompt_tokens, sender)
        of_queries = vectors[[place[query] for query, _ in pairs]]
        return Scores(similarities(of_queries, vectors[len(place) :]), _usage(lengths))

    async def classify(
        self,
        inputs: Inputs,
        *,
        truncate_prompt_tokens: int | None,
        sender: EncodeArguments,
    ) -> Classifications:
        """Return classifications: see :meth:`trioserve.engine.engine.Engine.classify`."""
        config = self._config("classify", "classify texts")
        logits, lengths = await self._vectors(as_items(inputs), truncate_prompt_tokens, sender)
        probabilities = probabilities_of(logits, independent=config.independent_labels)
        return Classifications(config.labels, logits, probabilities, _usage(lengths))

    async def score_labels(
        self,
        query: Text,
        items: str | Sequence[Text],
        label_token_ids: Sequence[int],
        *,
        apply_softmax: bool,
        item_first: bool,
        truncate_prompt_tokens: int | None,
        sender: EncodeArguments,
        cache_salt: str,
        adapter: str,
    ) -> LabelScores:
        """Return label scores: see :meth:`trioserve.engine.engine.Engine.score_labels`."""
        if self.task != "generate":
            raise self.refusal("score labels by the tokens that may come next")
        prompts = label_prompts(query, items, item_first=item_first)
        self._check(len(prompts), truncate_prompt_tokens, "items", sender.tenant)
        params = label_params(label_token_ids, truncate_prompt_tokens)

        async def complete(index: int, prompt: Prompt) -> Completion:
            try:
                return await self.complete(
                    prompt,
                    request_id=f"{sender.id}-{index}",
                    timeout=sender.timeout,
                    arrived=sender.arrived,
                    tenant=sender.tenant,
                    traceparent=sender.traceparent,
                    tracestate=sender.tracestate,
                    cache_salt=cache_salt,
                    adapter=adapter,
                    **params,
                )
            except InvalidRequest as error:
                error.param = _LABEL_NAMES.get(error.param or "", error.param)
                raise

        return label_scores(await all_together(complete, prompts), softmax=apply_softmax)

    def _check(
        self, count: int, truncate: int | None, param: str = "input", tenant: str = ""
    ) -> None:
        """Refuse more texts than can ever wait, and an invalid truncation.

        ``tenant`` is given if each text is a request of its own and counts for the tenant's share.
        """
        _check_truncation(truncate)
        limit = self.config.max_num_queued_reqs // (2 if tenant and count > 1 else 1)
        if count > limit:
            raise InvalidRequest(
                f"{param} has {count} texts; at most {limit} can wait (--max-num-queued-reqs)",
                param=param,
            )

    async def compute_one(self, timeout: float) -> None:
        """Compute one token as a health check; errors are those of :meth:`embed`."""
        await self._embeddings([TokensPrompt((0,))], None, EncodeArguments(timeout=timeout))

    def _config(self, task: ModelTask, wanted: str) -> EncoderConfig:
        """Return the configuration of an encoder for that ``task``.

        Raises:
            InvalidRequest: The model has another task.
        """
        if self.task != task or self.encoding is None:
            raise self.refusal(wanted)
        return self.encoding.encoder.config

    async def _embeddings(
        self, items: Sequence[Item], truncate: int | None, sender: EncodeArguments
    ) -> tuple[Floats, list[int]]:
        """Return the vectors [N, dim] of texts, as the model gives them, and the length of each."""
        if self.encoding is None:
            return await self._prompt_vectors(items, truncate, sender)
        return await self._vectors(items, truncate, sender)

    async def _prompt_vectors(
        self,
        items: Sequence[Item],
        truncate: int | None,
        sender: EncodeArguments,
        pooling: str | None = None,
        cache_salt: str = "",
        adapter: str = "",
    ) -> tuple[Floats, list[int]]:
        """Return a decoder's vectors of items of any length, and the length of each."""
        sender.check(cache_salt=cache_salt)
        self._check(len(items), truncate, tenant=sender.tenant)
        return await pool_prompts(
            items,
            self.pool_prompt,
            Deadline.of(sender.timeout, sender.arrived, self.config),
            sender,
            pooling=self.embedding.pooling if pooling is None else check_pooling(pooling),
            truncate=truncate,
            cache_salt=cache_salt,
            adapter=adapter,
        )

    async def _vectors(
        self, items: Sequence[Item], truncate: int | None, sender: EncodeArguments
    ) -> tuple[Floats, list[int]]:
        """Return the encoder's outputs [N, num_outputs] for the items, and the length of each."""
        assert self.encoding is not None
        sender.check()
        self._check(len(items), truncate)
        self.check_open()
        began = trio.current_time()
        deadline = Deadline.of(sender.timeout, sender.arrived, self.config)
        lengths: list[int] = []
        reason = "abort"
        failure: TrioserveError | None = None
        try:
            with self.open.opened(sender.id), deadline.enforced():
                texts = await self.encoding.encoder.encode(items, truncate)
                lengths = [len(text.ids) for text in texts]
                vectors = await self.encoding.compute(Columns.of(texts), sender.tenant)
                reason = "stop"
        except TrioserveError as error:
            reason, failure = "error", error
            raise
        finally:
            now = trio.current_time()
            num_tokens = sum(lengths)
            self.metrics.observe_texts(len(items), num_tokens, reason, now - began)
            self.on_end(
                EndedTexts(
                    id=sender.id,
                    count=len(items),
                    num_tokens=num_tokens,
                    reason=reason,
                    error=failure,
                    arrived=began if sender.arrived is None else sender.arrived,
                    finished=now,
                    traceparent=sender.traceparent,
                    tracestate=sender.tracestate,
                )
            )
        return vectors, lengths


def _usage(lengths: Sequence[int]) -> Usage:
    """Return the usage of texts with these lengths."""
    return Usage(prompt_tokens=sum(lengths), completion_tokens=0, cached_tokens=0)


def _check_truncation(truncate: int | None) -> None:
    is_number = isinstance(truncate, int) and not isinstance(truncate, bool)
    if truncate is not None and not (is_number and (truncate == -1 or truncate >= 1)):
        raise InvalidRequest(
            "truncate_prompt_tokens must be at least 1, or -1 for as many as the model takes; "
            f"got {truncate!r}",
            param="truncate_prompt_tokens",
        )


def _pairs(queries: str | Sequence[str], documents: str | Sequence[str]) -> list[Pair]:
    """Return each query with its document; a single query goes with all documents.

    Raises:
        InvalidRequest: There are none, or their numbers don't match.
    """
    firsts, seconds = _texts(queries, "queries"), _texts(documents, "documents")
    if len(firsts) == 1:
        firsts *= len(seconds)
    if len(firsts) != len(seconds):
        raise InvalidRequest(
            f"there are {len(firsts)} queries and {len(seconds)} documents: give one query for "
            "all documents, or one for each",
            param="documents",
        )
    return list(zip(firsts, seconds, strict=True))


def _texts(texts: str | Sequence[str], param: str) -> list[str]:
    if isinstance(texts, str):
        return [texts]
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"{param} is a text or a list of texts", param=param)
    if not texts:
        raise InvalidRequest(f"{param} is empty", param=param)
    return list(texts)
