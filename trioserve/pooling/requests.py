"""The requests for embeddings, scores and labels of one engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import attrs
import numpy as np
import numpy.typing as npt
import trio

from trioserve._util.together import all_together
from trioserve.config import EngineConfig
from trioserve.model_files.decoder_embedding import DecoderEmbedding
from trioserve.model_files.encoder_config import EncoderConfig
from trioserve.model_files.encoder_files import ModelTask
from trioserve.observability.metrics import Metrics
from trioserve.observability.tracing import EndedTexts
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
from trioserve.protocol.errors import InvalidRequest, TrioserveError
from trioserve.requests.deadline import Deadline
from trioserve.requests.generation import Completion, Usage
from trioserve.requests.options import RequestOptions
from trioserve.requests.prompts import Prompt, TokensPrompt

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
    "transcribe": "transcribes speech (Engine.transcribe, /v1/audio/transcriptions)",
}

_LABEL_NAMES = {"prompt": "items", "logprob_token_ids": "label_token_ids"}
"""Names of a completion's arguments in requests for label scores."""


@attrs.frozen(eq=False, kw_only=True)
class Encoding:
    """The encoding of texts: ``encoder`` turns them into ids, ``compute`` ids into vectors."""

    encoder: TextEncoder
    compute: Compute


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
        options: RequestOptions,
    ) -> Embeddings:
        """Return embeddings: see :meth:`trioserve.engine.engine.Engine.embed`."""
        items = as_items(inputs)
        if any(isinstance(item, tuple) for item in items):
            raise InvalidRequest("an embedding is one text's, not a pair's", param="input")
        if self.task == "transcribe":
            raise self.refusal("give embeddings")
        if self.encoding is None:
            vectors, lengths = await self._prompt_vectors(
                items, truncate_prompt_tokens, options, pooling
            )
            if normalize is None and self.embedding.normalize:
                normalize = True
            shape = Shape(dimensions, normalize, are_normalized=False)
            shape.check(vectors.shape[1])
            return Embeddings(shape.of(vectors), _usage(lengths), tuple(lengths))
        config = self._config("embed", "give embeddings")
        if options.adapter:
            raise InvalidRequest("an encoder has no adapters", param="adapter")
        if pooling is not None and pooling != config.pooling:
            raise InvalidRequest(
                f"pooling is this model's own, {config.pooling}: leave it out", param="pooling"
            )
        wanted = Shape(dimensions, normalize, config.normalize)
        wanted.check(config.num_outputs)
        vectors, lengths = await self._vectors(items, truncate_prompt_tokens, options)
        return Embeddings(wanted.of(vectors), _usage(lengths), tuple(lengths))

    async def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None,
        options: RequestOptions,
    ) -> Scores:
        """Return scores: see :meth:`trioserve.engine.engine.Engine.score`."""
        pairs = _pairs(queries, documents)
        config = None if self.encoding is None else self.encoding.encoder.config
        has_labels = config is not None and len(config.labels) > 1
        if self.task in ("generate", "transcribe") or has_labels:
            raise self.refusal("score pairs of texts")
        if config is not None and config.labels:
            vectors, lengths = await self._vectors(pairs, truncate_prompt_tokens, options)
            return Scores(activated(vectors, config.score_activation)[:, 0], _usage(lengths))
        place = {query: index for index, query in enumerate(dict.fromkeys(q for q, _ in pairs))}
        texts = [*place, *(document for _, document in pairs)]
        vectors, lengths = await self._embeddings(texts, truncate_prompt_tokens, options)
        of_queries = vectors[[place[query] for query, _ in pairs]]
        return Scores(similarities(of_queries, vectors[len(place) :]), _usage(lengths))

    async def classify(
        self,
        inputs: Inputs,
        *,
        truncate_prompt_tokens: int | None,
        options: RequestOptions,
    ) -> Classifications:
        """Return classifications: see :meth:`trioserve.engine.engine.Engine.classify`."""
        config = self._config("classify", "classify texts")
        logits, lengths = await self._vectors(as_items(inputs), truncate_prompt_tokens, options)
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
        options: RequestOptions,
    ) -> LabelScores:
        """Return label scores: see :meth:`trioserve.engine.engine.Engine.score_labels`."""
        if self.task != "generate":
            raise self.refusal("score labels by the tokens that may come next")
        prompts = label_prompts(query, items, item_first=item_first)
        self._check(len(prompts), truncate_prompt_tokens, "items", options.tenant)
        params = label_params(label_token_ids, truncate_prompt_tokens)
        name = options.named()

        async def complete(index: int, prompt: Prompt) -> Completion:
            try:
                return await self.complete(
                    prompt,
                    request_id=f"{name}-{index}",
                    timeout=options.timeout,
                    arrived=options.arrived,
                    tenant=options.tenant,
                    traceparent=options.traceparent,
                    tracestate=options.tracestate,
                    cache_salt=options.cache_salt,
                    adapter=options.adapter,
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
        await self._embeddings([TokensPrompt((0,))], None, RequestOptions(timeout=timeout))

    def _config(self, task: ModelTask, wanted: str) -> EncoderConfig:
        """Return the configuration of an encoder for that ``task``.

        Raises:
            InvalidRequest: The model has another task.
        """
        if self.task != task or self.encoding is None:
            raise self.refusal(wanted)
        return self.encoding.encoder.config

    async def _embeddings(
        self, items: Sequence[Item], truncate: int | None, options: RequestOptions
    ) -> tuple[Floats, list[int]]:
        """Return the vectors [N, dim] of texts, as the model gives them, and the length of each."""
        if self.encoding is None:
            return await self._prompt_vectors(items, truncate, options)
        return await self._vectors(items, truncate, options)

    async def _prompt_vectors(
        self,
        items: Sequence[Item],
        truncate: int | None,
        options: RequestOptions,
        pooling: str | None = None,
    ) -> tuple[Floats, list[int]]:
        """Return a decoder's vectors of items of any length, and the length of each."""
        options.check()
        self._check(len(items), truncate, tenant=options.tenant)
        return await pool_prompts(
            items,
            self.pool_prompt,
            Deadline.of(options.timeout, options.arrived, self.config),
            options,
            pooling=self.embedding.pooling if pooling is None else check_pooling(pooling),
            truncate=truncate,
        )

    async def _vectors(
        self, items: Sequence[Item], truncate: int | None, options: RequestOptions
    ) -> tuple[Floats, list[int]]:
        """Return the encoder's outputs [N, num_outputs] for the items, and the length of each."""
        assert self.encoding is not None
        options.check()
        self._check(len(items), truncate)
        self.check_open()
        name = options.named()
        began = trio.current_time()
        deadline = Deadline.of(options.timeout, options.arrived, self.config)
        lengths: list[int] = []
        reason = "abort"
        failure: TrioserveError | None = None
        try:
            with self.open.opened(name), deadline.enforced():
                texts = await self.encoding.encoder.encode(items, truncate)
                lengths = [len(text.ids) for text in texts]
                vectors = await self.encoding.compute(Columns.of(texts), options.tenant)
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
                    id=name,
                    count=len(items),
                    num_tokens=num_tokens,
                    reason=reason,
                    error=failure,
                    arrived=began if options.arrived is None else options.arrived,
                    finished=now,
                    traceparent=options.traceparent,
                    tracestate=options.tracestate,
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
