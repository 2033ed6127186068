"""The model's tokenizer, template and defaults, read by the engine's process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import attrs
import trio

from trioserve.config import EngineConfig
from trioserve.config.options import flag_name
from trioserve.config.override import parse_override
from trioserve.config.speculation import parse_speculative
from trioserve.model_files import (
    ENCODING,
    EncoderFiles,
    ModelFiles,
    load_tokenizer_from,
    locate,
    open_encoder,
    open_model,
    task_of,
)
from trioserve.model_files.decoder_embedding import DecoderEmbedding
from trioserve.model_files.encoder_files import ModelTask
from trioserve.model_files.generation_config import GenerationConfig, read_generation_file
from trioserve.model_files.media_config import MediaConfig, template_with_videos
from trioserve.model_files.speech_config import SpeechConfig
from trioserve.observability.logs import get_logger
from trioserve.pooling.inputs import TextEncoder
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.sampling import GENERATION_CONFIG_FIELDS
from trioserve.scheduler.beams import StopStringAtEnd
from trioserve.text.absent_tokenizer import AbsentTokenizer
from trioserve.text.chat_template import ChatTemplate
from trioserve.text.detokenizer import stop_string_at_end
from trioserve.text.encoder_tokenizer import EncoderTokenizer
from trioserve.text.tokenizer import Tokenizer

_T = TypeVar("_T")
_log = get_logger("trioserve.engine")


@attrs.frozen(kw_only=True)
class LoadedModel:
    """The parts of a model that this process needs: its name, its tokenizer and its defaults."""

    name: str
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    generation: GenerationConfig = attrs.field(factory=GenerationConfig)
    task: ModelTask = "generate"
    media: MediaConfig | None = None
    """Tower of a model that reads images or audio."""
    speech: SpeechConfig | None = None
    """Encoder and tokens of a model that transcribes speech."""
    encoder: TextEncoder | None = None
    """Turns texts into ids for an encoder."""
    embedding: DecoderEmbedding | None = None
    """The pooling of a decoder that was trained to embed texts."""

    @property
    def stop_string_at_end(self) -> StopStringAtEnd | None:
        """The function that finds the stop strings of beams; None if there is no text."""
        if not self.tokenizer.has_text:
            return None
        return functools.partial(stop_string_at_end, self.tokenizer)

    def reads(self, kind: str, config: EngineConfig) -> bool:
        """Return True if prompts may have media of ``kind``: there's a tower, and no limit of 0."""
        has_tower = self.media is not None and kind in self.media.token_ids
        return has_tower and config.most_media()[kind] > 0

    def log_defaults(self) -> None:
        """Log the default sampling parameters, if there are any."""
        if self.generation.shown():
            _log.info("defaults of requests", **self.generation.shown())

    @classmethod
    async def read(cls, config: EngineConfig, path: Path) -> LoadedModel:
        """:meth:`load` or :meth:`load_encoder` from ``path``, in a thread."""

        def load() -> LoadedModel:
            if task_of(path) in ENCODING:
                return cls.load_encoder(config, open_encoder(path))
            # A GGUF file's header holds its vocabulary, which isn't needed after this.
            return cls.load(config, open_model(path, config.model_impl))

        return await in_thread(load)

    @classmethod
    def load_encoder(cls, config: EngineConfig, files: EncoderFiles) -> LoadedModel:
        """Read an encoder's tokenizer. Blocks on the disk.

        Raises:
            ModelLoadError: it can't be read, or an option isn't for encoders.
        """
        for option in ("tokenizer", "chat_template"):
            if getattr(config, option) is not None:
                raise ModelLoadError(f"{flag_name(option)} isn't for an encoder: leave it out")
        if config.skip_tokenizer_init:
            raise ModelLoadError("--skip-tokenizer-init isn't for an encoder: leave it out")
        if config.serves_adapters:
            raise ModelLoadError("an encoder has no adapters: leave out --enable-lora")
        backend = files.load_tokenizer()
        longest = files.config.max_length
        return cls(
            name=files.name if Path(config.model).exists() else config.model,
            tokenizer=Tokenizer(backend),
            eos_token_ids=(),
            task=files.config.task,
            encoder=TextEncoder(
                files.config,
                EncoderTokenizer(backend, files.config),
                min(config.max_model_len or longest, longest),
            ),
        )

    @classmethod
    def load(cls, config: EngineConfig, files: ModelFiles) -> LoadedModel:
        """Read tokenizer and template. Blocks on the disk.

        Raises:
            ModelLoadError: one of them can't be read.
        """
        if files.speech is not None and config.skip_tokenizer_init:
            raise ModelLoadError(
                "--skip-tokenizer-init isn't for a model that transcribes speech: leave it out"
            )
        tokenizer = _load_tokenizer(config, files)
        options = parse_speculative(config.speculative_config)
        if options is not None and options.model and tokenizer.has_text:
            check_draft_tokenizer(tokenizer, options.model)
        return cls(
            name=files.name if Path(config.model).exists() else config.model,
            tokenizer=tokenizer,
            eos_token_ids=files.config.eos_token_ids,
            generation=chosen_generation_config(files.generation, config),
            task=_task_of(files),
            embedding=files.embedding,
            media=files.media,
            speech=files.speech,
        )


def _task_of(files: ModelFiles) -> ModelTask:
    if files.speech is not None:
        return "transcribe"
    return "generate" if files.embedding is None else "embed"


def check_draft_tokenizer(tokenizer: Tokenizer, draft_model: str) -> None:
    """Refuse a draft model with other tokens than the model's.

    Raises:
        ModelLoadError: A token differs, or the draft model can't be read.
    """
    own = tokenizer.backend.get_vocab()
    other = open_model(locate(draft_model)).load_tokenizer().get_vocab()
    different = own.items() ^ other.items()
    if different:
        token, number = min(different, key=lambda item: item[1])
        raise ModelLoadError(
            f"speculative_config: {draft_model} can't draft, because its tokens aren't the "
            f"model's: {len(different)} differ, such as {token!r} with id {number}"
        )


def chosen_generation_config(own: GenerationConfig, config: EngineConfig) -> GenerationConfig:
    """Return the defaults that the options ask for; ``own`` are the model's.

    The rules are vLLM's: ``max_new_tokens`` in the model's own file is a default, and in a file or
    an override that the operator names it is a limit for all requests, too.

    Raises:
        ModelLoadError: the file that ``generation_config`` names is missing or damaged.
    """
    source, given = config.generation_config, parse_override(config.override_generation_config)
    most = given.get("max_new_tokens")
    if source == "auto":
        chosen = own
    elif source == "vllm":
        chosen = GenerationConfig()
    else:
        chosen = read_generation_file(Path(source).expanduser())
        most = given.get("max_new_tokens", chosen.max_tokens)
    default = config.max_tokens_default or given.get("max_new_tokens", chosen.max_tokens)
    if most is not None:
        default = min(default or most, most)
    sampling = {
        name: value
        for name, value in (chosen.sampling | given).items()
        if name in GENERATION_CONFIG_FIELDS and value is not None
    }
    return GenerationConfig(sampling=sampling, max_tokens=default, most_tokens=most)


def _load_tokenizer(config: EngineConfig, files: ModelFiles) -> Tokenizer:
    if config.skip_tokenizer_init:
        return AbsentTokenizer(files.config.vocab_size)
    if config.tokenizer is None:
        backend = files.load_tokenizer()
    else:
        backend = load_tokenizer_from(config.tokenizer)
    own = template_with_videos(files.media, files.chat_template)
    source = _chat_template(config.chat_template) or own
    ends = {"bos_token": files.bos_token, "eos_token": files.eos_token}
    media: dict[str, str | None] = {}
    if files.media is not None:
        for kind, token in files.media.token_ids.items():
            media[f"{kind}_token"] = files.media.texts.get(kind) or backend.id_to_token(token)
    template = None if source is None else ChatTemplate(source, **ends, **media)
    return Tokenizer(backend, template, **ends)


def _chat_template(given: str | None) -> str | None:
    """Return the template that --chat-template names: a file's text, or the text itself."""
    if given is None or "{" in given or "\n" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except OSError as error:
        raise ModelLoadError(
            f"the chat template {given} can't be read: {error.strerror}"
        ) from error


async def in_thread(read: Callable[[], _T]) -> _T:
    """Return the result of ``read``. Cancelling doesn't wait for it: a disk may take for ever."""
    return await trio.to_thread.run_sync(read, abandon_on_cancel=True)
