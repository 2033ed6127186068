"""The options of a server."""

from __future__ import annotations

import attrs

from trioserve.config.adapter_paths import named_paths
from trioserve.config.engine import EngineConfig
from trioserve.config.options import option
from trioserve.protocol.errors import InvalidRequest

__all__ = ["ServerConfig"]

TOOL_CALL_PARSERS = (
    *("auto", "none", "hermes", "llama3", "mistral", "qwen3_coder", "glm45", "json"),
)
REASONING_PARSERS = ("auto", "none", "think")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("auto", "console", "json")


@attrs.frozen(kw_only=True)
class ServerConfig:
    """How the HTTP server listens and what it allows.

    Raises:
        InvalidRequest: a value isn't allowed; ``param`` names the option.
    """

    engine: EngineConfig
    served_model_name: tuple[str, ...] = option(
        (),
        "name that clients use for the model; may be given several times (default: the model's "
        "own)",
        group="http",
        common=True,
        metavar="NAME",
        repeatable=True,
    )
    tool_call_parser: str = option(
        "auto",
        "how the model writes tool calls; auto goes by its chat template",
        choices=TOOL_CALL_PARSERS,
        group="http",
        page="tools#How models write calls",
        common=True,
    )
    reasoning_parser: str = option(
        "auto",
        "how the model marks its reasoning; auto goes by its chat template",
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
        "Unix socket to listen on instead of a port",
        group="http",
        page="deployment#What the server sees",
        metavar="PATH",
    )
    api_server_count: int = option(
        1,
        "processes that do HTTP, tokenizing and detokenizing; with 1 the engine's own does it all",
        group="http",
        page="front-ends#Several front ends",
        common=True,
        kind=int,
        low=1,
        high=1024,
    )
    api_key: tuple[str, ...] = option(
        (),
        "key that clients must send as a bearer token; may be given several times; the variable is "
        "safer, as other users can read a command line",
        group="http",
        page="security#The defaults",
        common=True,
        metavar="KEY",
        repeatable=True,
        secret=True,
    )
    admin_api_key: tuple[str, ...] = option(
        (),
        "key for the routes that control the server, which answer nobody without one; may be "
        "given several times, and does for all other routes, too",
        group="http",
        page="operating#Operating a running server",
        metavar="KEY",
        repeatable=True,
        secret=True,
    )
    priority_api_key: tuple[str, ...] = option(
        (),
        "further key, whose requests may name a priority and a priority of their KV; where there "
        "is one, requests of other keys that do are answered with 403, but for admin keys; may be "
        "given several times",
        group="http",
        page="security#The defaults",
        metavar="KEY",
        repeatable=True,
        secret=True,
    )
    max_requests_per_key: int | None = option(
        None,
        "most requests of one API key that may be open at a time; the answer past it is 429 "
        "(default: any number)",
        group="http",
        page="overload#What to set",
        kind=int,
        low=1,
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "origin whose web pages may use this server from a browser, or * for any; may be given "
        "several times",
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
        "host name to answer to without an API key, *.NAME for all names below one, or * for any; "
        "may be given several times (default: IP addresses, localhost, the name listened on; "
        "beyond loopback, also names without a dot and of private networks)",
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
        "certificate to serve TLS with, and those that vouch for it",
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
        "what the private key is encrypted with",
        group="http",
        page="options#TLS",
        metavar="TEXT",
        secret=True,
    )
    ssl_ca_certs: str | None = option(
        None,
        "certificates of the authorities whose clients are served; others get no connection",
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
        "largest request body; the answer past it is 413",
        group="http",
        page="security#What is bounded",
        kind=int,
        low=1,
        in_bytes=True,
    )
    max_prompts_per_request: int = option(
        512,
        "most prompts in one request's batch; the answer past it is 400",
        group="http",
        page="security#What is bounded",
        kind=int,
        low=1,
    )
    ignore_unknown_fields: bool = option(
        False,
        "ignore fields of requests that aren't served, and log each name once, in place of 400",
        group="http",
        page="api#Requests",
        kind=bool,
    )
    request_timeout: float = option(
        60.0,
        "seconds that a client has for sending a request, its head and then its body",
        group="http",
        page="security#What is bounded",
        kind=float,
        low=0.01,
    )
    keep_alive_interval: float = option(
        15.0,
        "seconds of silence on an event stream before a comment line is sent",
        group="http",
        page="api#Streams",
        kind=float,
        low=0.01,
    )
    send_timeout: float = option(
        30.0,
        "seconds a client may leave the server's bytes unread before it is cut off",
        group="http",
        page="overload#Slow readers",
        kind=float,
        low=0.01,
    )
    shutdown_timeout: float = option(
        30.0,
        "seconds that running requests get to finish on Ctrl-C or SIGTERM",
        group="http",
        page="shutdown#A signal",
        common=True,
        kind=float,
        low=0,
    )
    log_level: str = option(
        "info", "least important message to log", choices=LOG_LEVELS, group="log", common=True
    )
    log_requests: bool = option(
        False,
        "log what requests say and are answered, too: prompts, outputs and sampling fields, "
        "up to 2000 characters each",
        group="log",
        page="observability#The request log",
        kind=bool,
    )
    log_format: str = option(
        "auto",
        "console for people, json for machines, auto by whether stderr is a terminal",
        choices=LOG_FORMATS,
        group="log",
    )

    def __attrs_post_init__(self) -> None:
        if self.priority_api_key and not self.api_key:
            raise InvalidRequest(
                "priority_api_key needs keys for all others (--api-key)", param="priority_api_key"
            )
        if self.max_requests_per_key is not None and not self.api_key:
            raise InvalidRequest(
                "max_requests_per_key needs keys to count by (--api-key)",
                param="max_requests_per_key",
            )
        for name, _ in named_paths(self.engine.lora_modules):
            if name in self.served_model_name:
                raise InvalidRequest(
                    f"lora_modules: {name!r} is a served_model_name, too", param="lora_modules"
                )
        for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"):
            if getattr(self, name) is not None and self.ssl_certfile is None:
                raise InvalidRequest(f"{name} needs a certificate (--ssl-certfile)", param=name)
