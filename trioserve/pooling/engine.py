"""An engine as those see it who want texts computed as a whole."""

from __future__ import annotations

from collections.abc import Sequence

from trioserve.pooling.inputs import Inputs
from trioserve.pooling.requests import Pooling
from trioserve.pooling.results import Classifications, Embeddings, LabelScores, Scores
from trioserve.pooling.sender import EncodeArguments


class PoolingEngine:
    """What :class:`trioserve.Engine` offers them; :class:`Pooling` does it."""

    __slots__ = ()

    pooling: Pooling

    async def embed(
        self,
        inputs: Inputs,
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        pooling: str | None = None,
        truncate_prompt_tokens: int | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
        arrived: float | None = None,
        tenant: str = "",
        cache_salt: str = "",
        adapter: str = "",
        traceparent: str = "",
        tracestate: str = "",
    ) -> Embeddings:
        """The embeddings of texts. Leaving the call, for whatever reason, aborts it.

        A model that generates gives them, too: of the hidden states behind its last layer.

        Args:
            inputs: a text, the token ids of one, or a list of either. Ids are taken as they are,
                special tokens included.
            dimensions: keep as many of each vector, and make it as long as 1 again: for models that
                were trained so (Matryoshka).
            normalize: whether vectors are as long as 1 (default: as the model's files say; yes for
                a model that generates).
            pooling: of a decoder: the hidden state of the ``last`` token or the ``mean`` of all
                (default: as the model's files say, else ``last``). An encoder's is its own.
            truncate_prompt_tokens: cut longer texts to as many tokens, -1 for as many as the model
                takes (default: refuse what is longer than that).
            request_id: a name for :meth:`abort` (default: a random one).
            timeout: seconds after which :exc:`~trioserve.protocol.errors.DeadlineExceeded` is
                raised (default: the option ``default_timeout``); infinity for never.
            arrived: the moment on trio's clock from which ``timeout`` counts (default: now).
            tenant: as for :meth:`generate`.
            cache_salt: share cached prefixes only with requests of the same salt.
            adapter: the name of a loaded adapter (default: the model as it is).
            traceparent: as for :meth:`generate`.
            tracestate: as there.

        Raises:
            InvalidRequest: the model is for something else, or an argument can't be served.
            AdapterNotFound: no adapter of that name is loaded.
            ContextTooLong: a text is longer than the model takes.
            QueueFull: too many texts wait, or too many tokens in them.
            Draining: the engine is shutting down.
            Paused: it is paused, and refuses what comes.
            DeadlineExceeded: the timeout ran out.
            RequestAborted: somebody has ended the request.
            EngineError: the worker can't compute one of the texts, or the engine failed.
        """
        return await self.pooling.embed(
            inputs,
            dimensions=dimensions,
            normalize=normalize,
            pooling=pooling,
            truncate_prompt_tokens=truncate_prompt_tokens,
            sender=EncodeArguments(
                request_id=request_id,
                timeout=timeout,
                arrived=arrived,
                tenant=tenant,
                traceparent=traceparent,
                tracestate=tracestate,
            ),
            cache_salt=cache_salt,
            adapter=adapter,
        )

    async def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
        arrived: float | None = None,
        tenant: str = "",
        traceparent: str = "",
        tracestate: str = "",
    ) -> Scores:
        """How well queries and documents go together: a score for each pair, larger for better.

        A model that scores pairs (a cross-encoder) reads each pair as one; of a model that embeds
        it is the cosine between the two embeddings.

        Args:
            queries: one for all documents, or one for each.
            documents: one or several.
            truncate_prompt_tokens: as for :meth:`embed`, as all else; of a pair, the longer text is
                cut first.

        Raises:
            InvalidRequest: the model is for something else, or an argument can't be served; and
                whatever :meth:`embed` raises.
        """
        return await self.pooling.score(
            queries,
            documents,
            truncate_prompt_tokens=truncate_prompt_tokens,
            sender=EncodeArguments(
                request_id=request_id,
                timeout=timeout,
                arrived=arrived,
                tenant=tenant,
                traceparent=traceparent,
                tracestate=tracestate,
            ),
        )

    async def score_labels(
        self,
        query: str | Sequence[int],
        items: str | Sequence[str | Sequence[int]],
        label_token_ids: Sequence[int],
        *,
        apply_softmax: bool = False,
        item_first: bool = False,
        truncate_prompt_tokens: int | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
        arrived: float | None = None,
        tenant: str = "",
        cache_salt: str = "",
        adapter: str = "",
        traceparent: str = "",
        tracestate: str = "",
    ) -> LabelScores:
        """How probable each of some tokens is after the query and each item; nothing is generated.

        For a model that generates. What the query has computed is shared by all items behind it.

        Args:
            query: text, or token ids.
            items: one or several, each of the query's kind.
            label_token_ids: the tokens.
            apply_softmax: make their probabilities 1 in all.
            item_first: put each item before the query, instead of behind it.
            truncate_prompt_tokens: as for :meth:`embed`, as all else.

        Raises:
            InvalidRequest: the model is for something else, or an argument can't be served; and
                whatever :meth:`embed` raises.
        """
        return await self.pooling.score_labels(
            query,
            items,
            label_token_ids,
            apply_softmax=apply_softmax,
            item_first=item_first,
            truncate_prompt_tokens=truncate_prompt_tokens,
            sender=EncodeArguments(
                request_id=request_id,
                timeout=timeout,
                arrived=arrived,
                tenant=tenant,
                traceparent=traceparent,
                tracestate=tracestate,
            ),
            cache_salt=cache_salt,
            adapter=adapter,
        )

    async def classify(
        self,
        inputs: Inputs,
        *,
        truncate_prompt_tokens: int | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
        arrived: float | None = None,
        tenant: str = "",
        traceparent: str = "",
        tracestate: str = "",
    ) -> Classifications:
        """How probable each label is for texts, or for pairs of texts given as tuples.

        Arguments and errors are those of :meth:`embed`.
        """
        return await self.pooling.classify(
            inputs,
            truncate_prompt_tokens=truncate_prompt_tokens,
            sender=EncodeArguments(
                request_id=request_id,
                timeout=timeout,
                arrived=arrived,
                tenant=tenant,
                traceparent=traceparent,
                tracestate=tracestate,
            ),
        )
