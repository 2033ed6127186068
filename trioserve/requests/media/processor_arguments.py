"""Arguments of calls of a model's processor, and the arrays that it may make with a request's.

Values and arrays are checked in a child process.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from trioserve.config.media import PROCESSOR_ARGUMENTS
from trioserve.requests.media.refusals import ArgumentsRefused
from trioserve.requests.media_arguments import MediaArguments, shown_names

_CALLER_ARGUMENTS = frozenset(
    (
        *("self", "return_tensors", "sampling_rate", "device", "raw_speech"),
        "load_audio_backend",  # a library that would read a file
    )
)
"""Arguments that only the caller of a processor gives."""
_OF_TOWER = frozenset(
    (
        *("patch_size", "temporal_patch_size", "merge_size"),
        *("image_grid_pinpoints", "crop_size"),
    )
)
"""Arguments that a request can't give: the tower's weights or configuration say what they are."""
_MAX_CHARACTERS = 300

Arrays = dict[str, np.ndarray[Any, Any]]
Form = tuple[str, int, tuple[int, ...]]
"""Number format, number of dimensions, and lengths of the inner ones."""


@attrs.frozen(kw_only=True)
class PartArguments:
    """The arguments that a request has for a part; false if it has none.

    Attributes:
        given: Arguments of the processor.
        max_array_bytes: Most bytes of the part's arrays; 0 if the request has no arguments.
    """

    given: Mapping[str, Any] = attrs.field(factory=dict)
    max_array_bytes: int = 0

    def __bool__(self) -> bool:
        return self.max_array_bytes > 0

    def __str__(self) -> str:
        """Return their names, for errors."""
        return str(MediaArguments(processor=self.given))


class KnownArguments:
    """The arguments that calls of a processor take.

    Args:
        processor: The processor.
        reads_images: True if it reads images.
        extractor: Its part for audio; None if it reads none.
    """

    def __init__(self, processor: Any, reads_images: bool, extractor: Any) -> None:
        kinds = getattr(getattr(processor, "valid_processor_kwargs", None), "__annotations__", {})
        types = []
        if reads_images:
            part = getattr(processor, "image_processor", processor)
            types += [kinds.get("images_kwargs"), getattr(part, "valid_kwargs", None)]
        if extractor is not None:
            types += [kinds.get("audio_kwargs"), getattr(extractor, "valid_kwargs", None)]
        self._types = [each for each in types if each is not None]
        names = {name for each in self._types for name in each.__annotations__}
        if extractor is not None:
            names |= {
                name
                for name, each in inspect.signature(extractor.__call__).parameters.items()
                if each.kind is not inspect.Parameter.VAR_KEYWORD
            }
        self.names = frozenset(names - _CALLER_ARGUMENTS)
        self.request_names = self.names - _OF_TOWER

    def check_values(self, given: Mapping[str, Any]) -> None:
        """Refuse a request's arguments of unknown names, or with values of wrong types.

        Raises:
            ArgumentsRefused: There is one; the reason names it.
        """
        error = unknown_arguments(given, self.request_names)
        if error:
            raise ArgumentsRefused(error)
        for name, value in given.items():
            reasons = [
                _type_error(each, name, value)
                for each in self._types
                if name in each.__annotations__
            ]
            # The call takes what one of the types takes.
            if reasons and all(reasons):
                raise ArgumentsRefused(f"{PROCESSOR_ARGUMENTS} has a wrong value: {reasons[0]}")


def unknown_arguments(given: Mapping[str, Any], names: frozenset[str]) -> str:
    """Return the reason for which arguments are refused, if one isn't among ``names``."""
    unknown = given.keys() - names
    if not unknown:
        return ""
    return (
        f"{PROCESSOR_ARGUMENTS} has {shown_names(unknown)}; the model's processor takes "
        f"{', '.join(sorted(names))}"
    )


def shown_error(error: BaseException) -> str:
    """Return a library's reason, which may contain what a client has sent."""
    return " ".join(str(error).split())[:_MAX_CHARACTERS] or type(error).__name__


def _type_error(types: Any, name: str, value: object) -> str:
    """Return the reason for which a value isn't of its type, empty if it is."""
    from huggingface_hub.dataclasses import validate_typed_dict

    try:
        validate_typed_dict(types, {name: value})
    except MemoryError:
        raise
    except Exception as error:  # validators of single arguments raise what they like
        return shown_error(error)
    return ""


@attrs.frozen
class ArrayForms:
    """The forms of the arrays that a processor makes of a part without a request's arguments.

    A tower is made for these. Images and clips of other sizes have other outer lengths: other
    numbers of tiles, patches or windows.
    """

    _forms: Mapping[str, Form]

    @classmethod
    def of(cls, arrays: Arrays) -> ArrayForms:
        """Return the forms of the arrays of some part."""
        return cls({name: _form(array) for name, array in arrays.items()})

    def check(self, arrays: Arrays, asked: PartArguments) -> None:
        """Refuse other arrays, too large ones, and numbers that aren't finite.

        Args:
            arrays: Arrays made with the request's arguments.
            asked: The arguments.

        Raises:
            ArgumentsRefused: One of these is there.
        """
        num_bytes = sum(array.nbytes for array in arrays.values())
        if num_bytes > asked.max_array_bytes:
            raise ArgumentsRefused(
                f"the processor makes arrays of {num_bytes} bytes with {asked}, and "
                f"{asked.max_array_bytes} are left for this part of the prompt"
            )
        others = arrays.keys() ^ self._forms.keys()
        if others:
            raise ArgumentsRefused(
                f"the model takes {shown_names(self._forms)}, and the processor gives "
                f"{shown_names(arrays)} with {asked}"
            )
        for name, array in arrays.items():
            if _form(array) != self._forms[name]:
                raise ArgumentsRefused(
                    f"the model takes {name} as {_shown_form(self._forms[name])}, and the "
                    f"processor gives {_shown_form(_form(array))} with {asked}"
                )
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise ArgumentsRefused(f"the processor gives no finite numbers with {asked}")


def _form(array: np.ndarray[Any, Any]) -> Form:
    # The frames of a spectrogram [1, frames, mels] are as many as the clip is long.
    inner = 2 if array.ndim == 3 else max(array.ndim - 2, 1)
    return array.dtype.name, array.ndim, array.shape[inner:]


def _shown_form(form: Form) -> str:
    dtype, num_dimensions, inner = form
    lengths = ["…"] * (num_dimensions - len(inner)) + [str(length) for length in inner]
    return f"{dtype} [{', '.join(lengths)}]"
