"""The options of a server."""

from __future__ import annotations

import attrs

from trioserve.config.adapter_paths import named_paths
from trioserve.config.engine import EngineConfig
from trioserve.config.options import option
from trioserve.protocol.errors import InvalidRequest

TOOL_CALL_PARSERS = (
    *("auto", "none", "hermes", "llama3", "mistral", "qwen3_coder", "glm45", "json"),
)
REASONING_PARSERS = ("auto", "none", "think")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("auto", "console", "json")


@attrs.frozen(kw_only=True)
class ServerConfig:
    """Options of an HTTP server: its addresses, keys and limits.

    Raises:
        InvalidRequest: A value isn't allowed; ``param`` names the option.
    """

    engine: EngineConfig
    served_model_name: tuple[str, ...] = option(
        (),
        "name of the model in requests; may be given several times",
        unset="the model's own",
        group="http",
        common=True,
        metavar="NAME",
        repeatable=True,
    )
    tool_call_parser: str = option(
        "auto",
        "format of the model's tool calls; auto reads it off the chat template",
        choices=TOOL_CALL_PARSERS,
        group="http",
        page="tools#How models write calls",
        common=True,
    )
    reasoning_parser: str = option(
        "auto",
        "format of the model's reasoning; auto reads it off the chat template",
        choices=REASONING_PARSERS,
        group="http",
        page="tools#Reasoning",
        common=True,
    )
    host: str = option(
        "127.0.0.1", "address to listen on", group="http", page="security#The defaults", common=True
    )
    port: int = option(
        8000,
        "port to listen on; 0 picks a free one",
        group="http",
        page="quickstart#Start the server",
        common=True,
        kind=int,
        low=0,
        high=65535,
    )
    uds: str | None = option(
        None,
        "Unix socket to listen on, in place of a port",
        group="http",
        page="deployment#What the server sees",
        metavar="PATH",
    )
    api_server_count: int = option(
        1,
        "processes for HTTP, tokenizing and detokenizing; with 1 the engine's own process "
        "does all of it",
        group="http",
        page="front-ends#Several front ends",
        common=True,
        kind=int,
        low=1,
        high=1024,
    )
    api_key: tuple[str, ...] = option(
        (),
        "key that clients must send as a bearer token; may be given several times; the "
        "variable is safer, since other users can read a command line",
        group="http",
        page="security#The defaults",
        common=True,
        metavar="KEY",
        repeatable=True,
        secret=True,
    )
    admin_api_key: tuple[str, ...] = option(
        (),
        "key for the routes that control the server, which are closed without one; opens all "
        "other routes, too; may be given several times",
        group="http",
        page="operating#Operating a running server",
        metavar="KEY",
        repeatable=True,
        secret=True,
    )
    priority_api_key: tuple[str, ...] = option(
        (),
        "further API key, whose requests may set a priority and a priority of their KV; where "
        "there is one, such requests with other keys than this and admin keys are refused "
        "with 403; may be given several times",
        group="http",
        page="security#The defaults",
        metavar="KEY",
        repeatable=True,
        secret=True,
    )
    max_requests_per_key: int | None = option(
        None,
        "most open requests of one API key; further ones are refused with 429",
        unset="no limit",
        group="http",
        page="overload#What to set",
        kind=int,
        low=1,
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "origin whose web pages may use this server from a browser, or * for any; may be "
        "given several times",
        group="http",
        page="security#The defaults",
        common=True,
        metavar="ORIGIN",
        repeatable=True,
        form=(
            r"\*|null|[A-Za-z][A-Za-z0-9+.-]*://[^/\s,*]+",
            "an origin, such as https://example.org, without a path, or * for any",
        ),
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "host name that is served without an API key, *.NAME for all names below one, or * "
        "for any; may be given several times",
        unset=(
            "IP addresses, localhost, the name listened on; beyond loopback, also names without a "
            "dot and of private networks"
        ),
        group="http",
        page="security#Host names",
        common=True,
        metavar="HOST",
        repeatable=True,
        form=(
            r"\*|(\*\.)?\w([\w.-]*\w)?\.?",
            "a host's name without a port, such as llm.example.org, *.example.org, or * for any",
        ),
    )
    ssl_certfile: str | None = option(
        None,
        "certificate to serve TLS with, followed by the other certificates of its chain",
        group="http",
        page="options#TLS",
        common=True,
        metavar="PATH",
    )
    ssl_keyfile: str | None = option(
        None,
        "private key of the certificate, where it isn't in the same file",
        group="http",
        page="options#TLS",
        common=True,
        metavar="PATH",
    )
    ssl_keyfile_password: str | None = option(
        None,
        "password of the private key",
        group="http",
        page="options#TLS",
        metavar="TEXT",
        secret=True,
    )
    ssl_ca_certs: str | None = option(
        None,
        "certificates of the authorities that sign clients' certificates; a client without a "
        "signed one gets no connection",
        group="http",
        page="options#TLS",
        metavar="PATH",
    )
    root_path: str = option(
        "",
        "path prefix of a proxy in front; requests are served with it and without it",
        group="http",
        page="deployment#What the server sees",
        metavar="PATH",
    )
    console: bool = option(
        True,
        "serve the console at /console, and the live feed that it shows",
        group="http",
        page="console#The console",
        kind=bool,
    )
    max_body_size: int = option(
        32 << 20,
        "largest request body; a larger one is refused with 413",
        group="http",
        page="security#What is bounded",
        kind=int,
        low=1,
        in_bytes=True,
    )
    max_prompts_per_request: int = option(
        512,
        "most prompts in one request; a request with more is refused with 400",
        group="http",
        page="security#What is bounded",
        kind=int,
        low=1,
    )
    ignore_unknown_fields: bool = option(
        False,
        "ignore request fields that aren't served and log each name once, in place of "
        "refusing them with 400",
        group="http",
        page="api#Requests",
        kind=bool,
    )
    request_timeout: float = option(
        60.0,
        "seconds that a client may take to send a request's head, and again for its body; "
        "past them it is refused with 408",
        group="http",
        page="security#What is bounded",
        kind=float,
        low=0.01,
    )
    keep_alive_interval: float = option(
        15.0,
        "seconds of silence on an event stream after which a comment line is sent",
        group="http",
        page="api#Streams",
        kind=float,
        low=0.01,
    )
    send_timeout: float = option(
        30.0,
        "seconds that a client may leave the server's bytes unread; past them it is disconnected",
        group="http",
        page="overload#Slow readers",
        kind=float,
        low=0.01,
    )
    shutdown_timeout: float = option(
        30.0,
        "seconds that running requests get to finish after Ctrl-C or SIGTERM",
        group="http",
        page="shutdown#A signal",
        common=True,
        kind=float,
        low=0,
    )
    log_level: str = option(
        "info", "lowest level of messages to log", choices=LOG_LEVELS, group="log", common=True
    )
    log_requests: bool = option(
        False,
        "log each request's prompt, output and sampling fields, up to 2000 characters each",
        group="log",
        page="observability#The request log",
        kind=bool,
    )
    log_format: str = option(
        "auto",
        "console for people, json for machines; auto takes console where stderr is a "
        "terminal, else json",
        choices=LOG_FORMATS,
        group="log",
    )

    def __attrs_post_init__(self) -> None:
        if self.priority_api_key and not self.api_key:
            raise InvalidRequest(
                "priority_api_key needs keys for other clients (--api-key)",
                param="priority_api_key",
            )
        if self.max_requests_per_key is not None and not self.api_key:
            raise InvalidRequest(
                "max_requests_per_key needs API keys (--api-key)",
                param="max_requests_per_key",
            )
        for name, _ in named_paths(self.engine.lora_modules):
            if name in self.served_model_name:
                raise InvalidRequest(
                    f"lora_modules: {name!r} is already a served_model_name", param="lora_modules"
                )
        for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"):
            if getattr(self, name) is not None and self.ssl_certfile is None:
                raise InvalidRequest(f"{name} needs a certificate (--ssl-certfile)", param=name)
