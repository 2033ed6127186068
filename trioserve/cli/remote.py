"""The connection to a server whose URL and key are on the command line."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from urllib.parse import urlsplit

from trioserve.cli.remote_options import RemoteOptions
from trioserve.cli.usage import UsageError
from trioserve.load.connect import Address, parse_url, tls_context
from trioserve.load.remote import Remote


def remote_of(options: RemoteOptions) -> tuple[Remote, Address]:
    """Return the server and its address.

    Raises:
        UsageError: An option isn't allowed.
    """
    address = address_of(options.url)
    context = certificates(address, options.ca_file, insecure=options.insecure)
    remote = Remote(
        connect=address.connect(context),
        host=address.authority,
        url=address.url,
        headers=authorization(options.api_key),
    )
    return remote, address


def address_of(url: str, *, instead: str = "--api-key") -> Address:
    """Return the server's address; an error about a password in the URL suggests ``instead``.

    Raises:
        UsageError: ``url`` is invalid, or has a password.
    """
    try:
        address = parse_url(url)
    except ValueError as error:
        raise UsageError(f"URL: {error}") from error
    if "@" in urlsplit(url if "://" in url else f"//{url}").netloc:
        # The URL is printed and written to results, which must not have keys.
        raise UsageError(f"URL: a name and a password in it aren't sent: give {instead}")
    return address


def certificates(address: Address, ca_file: str | None, *, insecure: bool) -> ssl.SSLContext | None:
    """Return the TLS settings for the server's certificate; None without TLS.

    Raises:
        UsageError: The file can't be used, or an option needs TLS.
    """
    if not address.tls:
        for flag, given in (("--ca-file", ca_file), ("--insecure", insecure)):
            if given:
                raise UsageError(f"{flag} needs a URL that begins with https://")
        return None
    try:
        return tls_context(None if ca_file is None else Path(ca_file), insecure=insecure)
    except OSError as error:  # SSLError is one
        raise UsageError(f"--ca-file: {ca_file} can't be used: {error}") from error


def authorization(api_key: str | None) -> dict[str, str]:
    """Return the header with ``api_key``, else with ``$OPENAI_API_KEY``; none without a key.

    Raises:
        UsageError: The key can't be sent.
    """
    key = api_key or os.environ.get("OPENAI_API_KEY")
    if not key:
        return {}
    if not key.isprintable():
        given = "--api-key" if api_key else "$OPENAI_API_KEY"
        raise UsageError(f"{given} must be one line of printable characters")
    return {"Authorization": f"Bearer {key}"}
