"""Requests from callers' arguments: checked, seeded, each with a stream of its own."""

from __future__ import annotations

import hashlib
import random

import attrs
import trio

from trioserve.config import EngineConfig
from trioserve.engine.validation import (
    check_embeddings,
    check_media,
    check_params,
    check_prediction,
    check_prompt,
    check_prompt_adapter,
    check_without_text,
    limit_output,
    max_prompt_tokens,
    sampler_params,
)
from trioserve.model_files.generation_config import GenerationConfig
from trioserve.protocol.sampling import SamplerParams, SamplingParams
from trioserve.requests.adapters import THE_MODEL, Adapter
from trioserve.requests.embedded import PLACEHOLDER
from trioserve.requests.options import RequestOptions
from trioserve.requests.prompts import Prompt, TokensPrompt, embeddings_in, media_in
from trioserve.requests.request import Request, Sequence, Times
from trioserve.requests.stream import Stream, StreamBudget
from trioserve.text.tokenizer import Tokenizer


@attrs.frozen(eq=False, kw_only=True)
class RequestMaker:
    """Makes the requests of one engine.

    Args:
        config: has limits.
        tokenizer: the model's.
        generation: how long outputs may be.
        max_model_len: longest sequence in tokens.
        vocab_size: of the model.
        embedding_width: that of embeddings in a prompt; 0 if the worker takes none.
        eos_token_ids: the tokens that end a sequence by themselves.
        stream_budget: bounds the output that waits for slow readers.
        seeds: seeds requests that bring no seed.
    """

    config: EngineConfig
    tokenizer: Tokenizer
    generation: GenerationConfig = attrs.field(factory=GenerationConfig)
    max_model_len: int
    vocab_size: int
    embedding_width: int
    eos_token_ids: tuple[int, ...]
    stream_budget: StreamBudget
    seeds: random.Random

    def make(
        self,
        prompt: Prompt,
        params: SamplingParams,
        options: RequestOptions,
        *,
        adapter: Adapter = THE_MODEL,
    ) -> Request:
        """Make a request with a sequence for each output. It isn't admitted yet.

        ``adapter`` is the one that the options name.

        Raises:
            InvalidRequest: a parameter can't be served, or an id isn't the model's.
            ContextTooLong: the prompt is certain to be longer than the model's context.
        """
        now = trio.current_time()
        check_params(params, self.config, vocab_size=self.vocab_size)
        if not self.tokenizer.has_text:
            check_without_text(params)
        if params.prediction:
            check_prediction(params.prediction, self.tokenizer)
            if self.config.speculative_config is None:
                params = attrs.evolve(params, prediction="")  # it needn't be encoded
        if embeddings_in(prompt):
            check_embeddings(prompt, params, self.embedding_width)
        if media_in(prompt):
            check_media(params)
        params = limit_output(params, self.generation.most_tokens)
        num_virtual_tokens = adapter.num_virtual_tokens
        if num_virtual_tokens:
            check_prompt_adapter(adapter.name, params)
        keep = max_prompt_tokens(params, self.max_model_len - num_virtual_tokens)
        fewest_tokens = self._fewest_tokens(prompt, keep)
        prefix_ids = (*(PLACEHOLDER,) * num_virtual_tokens, *options.prefix_ids)
        if prefix_ids:
            fewest_tokens += self._fewest_tokens(TokensPrompt(prefix_ids))
        request = Request(
            id=options.named(),
            prompt=prompt,
            params=params,
            stream=Stream(self.stream_budget),
            times=Times(arrived=now if options.arrived is None else min(options.arrived, now)),
            priority=options.priority,
            cache_salt=self.stored_salt(options.cache_salt, options.tenant),
            tenant=options.tenant,
            retention=options.retention and options.retention.behind(num_virtual_tokens),
            adapter=adapter.number,
            traceparent=options.traceparent,
            tracestate=options.tracestate,
            max_prompt_tokens=keep,
            default_max_tokens=self.generation.max_tokens,
            fewest_tokens=fewest_tokens,
            prefix_ids=prefix_ids,
            num_virtual_tokens=num_virtual_tokens,
        )
        request.sequences += self._sequences(request, options)
        return request

    def _sequences(self, request: Request, options: RequestOptions) -> list[Sequence]:
        """Return a sequence for each output of ``request``."""
        params = request.params
        seed = self.seeds.getrandbits(64) if params.seed is None else params.seed % 2**64
        scope = self._draft_scope(options, request.adapter)
        sampler = sampler_params(params, seed, self.eos_token_ids, self.tokenizer, scope)
        return [
            Sequence(request=request, index=index, sampler=_with_index(sampler, index))
            for index in range(params.n)
        ]

    def stored_salt(self, salt: str, tenant: str) -> str:
        """Return the digest under which this tenant's requests of ``salt`` share prefixes."""
        by_tenant = tenant and self.config.prefix_cache_scope == "key"
        return _digest(f"{tenant}\0{salt}" if by_tenant else salt)

    def _draft_scope(self, options: RequestOptions, adapter: int) -> str:
        """Return the name under which outputs may be drafted from each other.

        Each tenant's are apart, whatever shares the prefix cache.
        """
        if self.config.speculative_config is None:
            return ""
        return _digest(f"{options.tenant}\0{options.cache_salt}\0{adapter}")

    def _fewest_tokens(self, prompt: Prompt, keep: int | None = None) -> int:
        """Check a prompt, and return a lower bound of its tokens."""
        return check_prompt(
            prompt,
            self.tokenizer,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            keep=keep,
        )


def _digest(salt: str) -> str:
    """Return a digest of ``salt`` for the prefix cache, which outlives the request."""
    if not salt:
        return ""
    data = salt.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _with_index(sampler: SamplerParams, index: int) -> SamplerParams:
    return attrs.evolve(sampler, sequence_index=index) if index else sampler
