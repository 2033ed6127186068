"""Checked options from parsed arguments and environment variables.

A flag wins over its variable, and a variable over the default.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any, TypeVar

import attrs

from trioserve.cli.bench_options import BenchOptions
from trioserve.cli.front_end_options import FRONT_END_SERVER_OPTIONS, FrontEndOptions
from trioserve.cli.parser import DEFAULT_MODEL, SAMPLING_OPTIONS
from trioserve.cli.remote_options import DEFAULT_URL, RemoteOptions
from trioserve.cli.top.options import TopOptions
from trioserve.cli.usage import UsageError
from trioserve.cli.worker_options import WorkerOptions
from trioserve.config import EngineConfig, ServerConfig
from trioserve.config.options import (
    Option,
    closest,
    environment_name,
    options_from_environment,
    options_of,
    unknown_variables,
)
from trioserve.config.router import (
    ROUTER_ENGINE_OPTIONS,
    ROUTER_SERVER_OPTIONS,
    RouterConfig,
)
from trioserve.protocol.errors import InvalidRequest
from trioserve.protocol.sampling import SamplingParams

Config = TypeVar("Config", EngineConfig, ServerConfig, RouterConfig)
Joining = TypeVar("Joining", WorkerOptions, FrontEndOptions)


def engine_config(arguments: Mapping[str, Any], environment: Mapping[str, str]) -> EngineConfig:
    """Return the engine's options from flags and variables.

    Raises:
        UsageError: A value isn't allowed.
    """
    model = _model(arguments, environment)
    return _config(EngineConfig, arguments, environment, model=model)


def server_config(arguments: Mapping[str, Any], environment: Mapping[str, str]) -> ServerConfig:
    """Return the server's options, with the engine's, from flags and variables.

    Raises:
        UsageError: A value isn't allowed.
    """
    engine = engine_config(arguments, environment)
    return _config(ServerConfig, arguments, environment, engine=engine)


def router_config(arguments: Mapping[str, Any], environment: Mapping[str, str]) -> RouterConfig:
    """Return a router's options from flags and variables.

    Raises:
        UsageError: A value isn't allowed.
    """
    engine = _config(
        EngineConfig, arguments, environment, only=ROUTER_ENGINE_OPTIONS, model="router"
    )
    server = _config(
        ServerConfig, arguments, environment, only=ROUTER_SERVER_OPTIONS, engine=engine
    )
    urls = tuple(arguments["urls"])
    return _config(RouterConfig, arguments, environment, server=server, urls=urls)


def bench_options(arguments: Mapping[str, Any]) -> BenchOptions:
    """Return the options of a measurement from flags.

    Raises:
        UsageError: A value isn't allowed.
    """
    options = list(options_of(BenchOptions))
    given = arguments.get("url")
    try:
        fields = _from_flags(options, arguments)
        if given is not None and "embedded" in fields:
            raise UsageError("--embedded can't be given with a URL")
        return BenchOptions(**fields, url=given or DEFAULT_URL)
    except InvalidRequest as error:
        raise _as_written(error, {option.name for option in options}, options) from error


def remote_options(arguments: Mapping[str, Any]) -> RemoteOptions:
    """Return the address and keys of a server from flags."""
    fields = _from_flags(options_of(RemoteOptions), arguments)
    return RemoteOptions(**fields, url=arguments["url"] or DEFAULT_URL)


def top_options(arguments: Mapping[str, Any]) -> TopOptions:
    """Return the options of ``top`` from flags.

    Raises:
        UsageError: A value isn't allowed.
    """
    options = list(options_of(TopOptions))
    try:
        fields = _from_flags(options, arguments)
        url = arguments["url"] or DEFAULT_URL
        return TopOptions(**fields, url=url, once=arguments["once"], json=arguments["json"])
    except InvalidRequest as error:
        raise _as_written(error, arguments, options) from error


def worker_options(
    arguments: Mapping[str, Any], environment: Mapping[str, str]
) -> tuple[WorkerOptions, str]:
    """Return the options of ``worker`` from flags, and the model.

    Raises:
        UsageError: A value isn't allowed, or is missing.
    """
    return _joining_options(WorkerOptions, arguments), _model(arguments, environment)


def front_end_options(
    arguments: Mapping[str, Any], environment: Mapping[str, str]
) -> tuple[FrontEndOptions, ServerConfig, str]:
    """Return the options of ``front-end``, its own options of a server, and the model.

    Raises:
        UsageError: A value isn't allowed, or is missing.
    """
    server = _config(
        ServerConfig,
        arguments,
        environment,
        only=FRONT_END_SERVER_OPTIONS,
        engine=EngineConfig("front-end"),
    )
    model = _model(arguments, environment)
    return _joining_options(FrontEndOptions, arguments), server, model


def _joining_options(cls: type[Joining], arguments: Mapping[str, Any]) -> Joining:
    options = list(options_of(cls))
    try:
        return cls(**_from_flags(options, arguments))
    except InvalidRequest as error:
        raise _as_written(error, {option.name for option in options}, options) from error


def _model(arguments: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """Return the model that is given, or the default one."""
    return arguments.get("model") or environment.get(environment_name("model")) or DEFAULT_MODEL


def chat_server(arguments: Mapping[str, Any]) -> RemoteOptions | None:
    """Return the server that ``chat`` talks to; None for a model that is loaded here.

    Raises:
        UsageError: A server's flag is given without ``--url``, or an engine's flag with it.
    """
    if arguments["url"] is None:
        _refuse_flags(arguments, RemoteOptions, "needs --url")
        return None
    _refuse_flags(arguments, EngineConfig, "is for a model that is loaded here, not for --url")
    return remote_options(arguments)


def _refuse_flags(arguments: Mapping[str, Any], cls: type[attrs.AttrsInstance], why: str) -> None:
    for option in options_of(cls):
        if option.name in arguments:
            raise UsageError(f"{option.flag} {why}")


def embedded_config(options: BenchOptions, environment: Mapping[str, str]) -> EngineConfig | None:
    """Return the engine's options for ``--embedded``; None without this flag.

    Raises:
        UsageError: An ``--engine-option`` doesn't exist, or its value isn't allowed.
    """
    if options.embedded is None:
        return None
    known = {option.name: option for option in options_of(EngineConfig)}
    given: dict[str, Any] = {}
    for text in options.engine_option:
        written, _, value = text.partition("=")
        name = written.replace("-", "_")
        if name not in known:
            meant = closest(name, known)
            raise UsageError(
                f"--engine-option: the engine has no option {written}"
                + (f"; did you mean {meant.replace('_', '-')}?" if meant else "")
            )
        try:
            given[name] = known[name].from_variable(value)
            known[name].check(given[name])
        except InvalidRequest as error:
            raise UsageError(f"--engine-option {error}") from error
    try:
        values = options_from_environment(EngineConfig, environment) | given
        return EngineConfig(options.embedded, **values)
    except InvalidRequest as error:
        raise _as_written(error, {}, known.values()) from error


def sampling_fields(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of SamplingParams that flags set, checked.

    Raises:
        UsageError: A value isn't allowed.
    """
    try:
        fields = _from_flags(SAMPLING_OPTIONS, arguments)
        SamplingParams(**fields)
    except InvalidRequest as error:
        raise _as_written(error, arguments, SAMPLING_OPTIONS) from error
    return fields


def unknown_variable_lines(environment: Mapping[str, str]) -> list[str]:
    """Return a warning for each variable with the prefix of options that isn't an option."""
    classes = (EngineConfig, ServerConfig, RouterConfig)
    known = [option.name for cls in classes for option in options_of(cls)]
    return [
        f"{name} is no option" + (f"; did you mean {meant}?" if meant else "")
        for name, meant in unknown_variables(["model", "history", *known], environment)
    ]


def _config(
    cls: type[Config],
    arguments: Mapping[str, Any],
    environment: Mapping[str, str],
    *,
    only: Container[str] | None = None,
    **more: Any,
) -> Config:
    """Return the options of a class, or ``only`` some of them with the defaults of the others."""
    options = list(options_of(cls))
    try:
        values = options_from_environment(cls, environment) | _from_flags(options, arguments)
        kept = {name: each for name, each in values.items() if only is None or name in only}
        return cls(**kept, **more)
    except InvalidRequest as error:
        raise _as_written(error, arguments, options) from error


def _from_flags(options: Iterable[Option], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the given flags by option name."""
    values: dict[str, Any] = {}
    for option in options:
        if option.name not in arguments:
            continue
        given = arguments[option.name]
        if option.repeatable:
            values[option.name] = tuple(option.from_text(text) for text in given)
        else:
            values[option.name] = given if option.kind is bool else option.from_text(given)
    return values


def _as_written(
    error: InvalidRequest, arguments: Container[str], options: Iterable[Option]
) -> UsageError:
    """Return the error with the option's name as it was given: a flag or a variable.

    ``arguments`` has the names of the options that were given as flags.
    """
    message = str(error)
    for option in options:
        if option.name == error.param:
            written = option.flag if option.name in arguments else option.environment
            message = message.replace(option.name, written, 1)
    return UsageError(message)
