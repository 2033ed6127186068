"""Certificates for tests, made anew each time."""

from __future__ import annotations

from pathlib import Path

import attrs
import trustme
from cryptography.hazmat.primitives import serialization


@attrs.frozen
class Authority:
    """One that vouches for certificates. ``folder`` gets them and their keys, as PEM files."""

    folder: Path
    _authority: trustme.CA

    @property
    def file(self) -> str:
        return str(self.folder / "ca.crt")

    def issue(self, name: str) -> tuple[str, str]:
        """Return a certificate for 127.0.0.1 and its key: two paths."""
        issued = self._authority.issue_cert("127.0.0.1", common_name=name)
        certificate, key = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        issued.cert_chain_pems[0].write_to_path(str(certificate))
        issued.private_key_pem.write_to_path(str(key))
        return str(certificate), str(key)

    def encrypt(self, key: str, password: str) -> str:
        """Return the path of the key in another file, encrypted with a password."""
        plain = serialization.load_pem_private_key(Path(key).read_bytes(), password=None)
        encrypted = Path(key + ".encrypted")
        encrypted.write_bytes(
            plain.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.BestAvailableEncryption(password.encode()),
            )
        )
        return str(encrypted)


def make_authority(folder: Path) -> Authority:
    """Return a new authority with its files in ``folder``."""
    folder.mkdir()
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.crt"))
    return Authority(folder, authority)
