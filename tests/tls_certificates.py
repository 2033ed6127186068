"""Certificates for tests, made by the ``openssl`` command."""

from __future__ import annotations

import subprocess
from pathlib import Path

import attrs


@attrs.frozen
class Authority:
    """One that vouches for certificates. ``folder`` holds them and their keys, as PEM files."""

    folder: Path

    @property
    def file(self) -> str:
        return str(self.folder / "ca.crt")

    def issue(self, name: str) -> tuple[str, str]:
        """A certificate for 127.0.0.1 and its key: two paths."""
        key, request = self.folder / f"{name}.key", self.folder / f"{name}.csr"
        certificate = self.folder / f"{name}.crt"
        extensions = self.folder / "extensions"
        extensions.write_text("subjectAltName=IP:127.0.0.1")
        _openssl("req", *_NEW_KEY, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        _openssl(
            *("x509", "-req", "-in", request, "-CA", self.file, "-CAkey", self.folder / "ca.key"),
            *("-CAcreateserial", "-days", "2", "-extfile", extensions, "-out", certificate),
        )
        return str(certificate), str(key)

    def encrypt(self, key: str, password: str) -> str:
        """The key in another file, which a password opens."""
        encrypted = key + ".encrypted"
        _openssl("ec", "-in", key, "-aes256", "-passout", f"pass:{password}", "-out", encrypted)
        return encrypted


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def make_authority(folder: Path) -> Authority:
    """A new authority whose files are in ``folder``."""
    folder.mkdir()
    _openssl(
        *("req", "-x509", *_NEW_KEY, "-days", "2", "-subj", "/CN=tests"),
        *("-keyout", folder / "ca.key", "-out", folder / "ca.crt"),
    )
    return Authority(folder)


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
