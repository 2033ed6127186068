"""The engine's methods for embeddings, scores and labels."""

from __future__ import annotations

from collections.abc import Sequence

from trioserve.pooling.inputs import Inputs
from trioserve.pooling.requests import Pooling
from trioserve.pooling.results import Classifications, Embeddings, LabelScores, Scores
from trioserve.requests.options import RequestOptions


class PoolingEngine:
    """The part of :class:`trioserve.Engine` for whole texts; :class:`Pooling` does the work."""

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
        """Return the embeddings of texts. Cancelling the call aborts it.

        A generative model gives embeddings too, made of the hidden states behind its last layer.
        The arguments from ``request_id`` on are those of :meth:`generate`.

        Args:
            inputs: A text, the token ids of one, or a list of either. Ids are taken as they are,
                special tokens included.
            dimensions: Keep as many dimensions of each vector and normalize it again, for models
                that were trained so (Matryoshka).
            normalize: Scale vectors to length 1 (default: as the model's files say; yes for a
                generative model).
            pooling: For a generative model: the hidden state of the ``last`` token or the ``mean``
                of all (default: as the model's files say, else ``last``). An encoder's is fixed.
            truncate_prompt_tokens: Cut longer texts to as many tokens, -1 for as many as the model
                takes (default: refuse longer texts).

        Raises:
            InvalidRequest: The model has another task, or an argument can't be served. All errors
                of :meth:`generate` may occur, too.
            ContextTooLong: A text is longer than the model takes.
            RequestAborted: The request was aborted.
            EngineError: The worker can't compute one of the texts, or the engine failed.
        """
        return await self.pooling.embed(
            inputs,
            dimensions=dimensions,
            normalize=normalize,
            pooling=pooling,
            truncate_prompt_tokens=truncate_prompt_tokens,
            options=RequestOptions(
                request_id=request_id,
                timeout=timeout,
                arrived=arrived,
                cache_salt=cache_salt,
                tenant=tenant,
                adapter=adapter,
                traceparent=traceparent,
                tracestate=tracestate,
            ),
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
        """Return a score for each pair of a query and a document, larger for a better match.

        A cross-encoder reads each pair as one text. For a model that embeds, the score is the
        cosine between the two embeddings.

        Args:
            queries: One for all documents, or one for each.
            documents: One or several.
            truncate_prompt_tokens: As for :meth:`embed`, like all other arguments. The longer text
                of a pair is cut first.

        Raises:
            InvalidRequest: The model has another task, or an argument can't be served. All errors
                of :meth:`embed` may occur, too.
        """
        return await self.pooling.score(
            queries,
            documents,
            truncate_prompt_tokens=truncate_prompt_tokens,
            options=RequestOptions(
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
        """Return the probability of each given token after the query and each item.

        This needs a generative model, but nothing is generated. The query is computed once for all
        items behind it.

        Args:
            query: Text, or token ids.
            items: One or several, each of the query's kind.
            label_token_ids: The tokens.
            apply_softmax: Scale the probabilities of an item to sum to 1.
            item_first: Put each item before the query, instead of behind it.
            truncate_prompt_tokens: As for :meth:`embed`, like all other arguments.

        Raises:
            InvalidRequest: The model has another task, or an argument can't be served. All errors
                of :meth:`embed` may occur, too.
        """
        return await self.pooling.score_labels(
            query,
            items,
            label_token_ids,
            apply_softmax=apply_softmax,
            item_first=item_first,
            truncate_prompt_tokens=truncate_prompt_tokens,
            options=RequestOptions(
                request_id=request_id,
                timeout=timeout,
                arrived=arrived,
                cache_salt=cache_salt,
                tenant=tenant,
                adapter=adapter,
                traceparent=traceparent,
                tracestate=tracestate,
            ),
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
        """Return the probability of each label for texts, or for pairs of texts given as tuples.

        Arguments and errors are those of :meth:`embed`.
        """
        return await self.pooling.classify(
            inputs,
            truncate_prompt_tokens=truncate_prompt_tokens,
            options=RequestOptions(
                request_id=request_id,
                timeout=timeout,
                arrived=arrived,
                tenant=tenant,
                traceparent=traceparent,
                tracestate=tracestate,
            ),
        )
