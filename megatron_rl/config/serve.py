"""Settings of --stage serve, by the subjects of docs/flags.md."""

import dataclasses
from pathlib import Path

from megatron_rl.flag import own_flag

MOST_NAMED = 8
"""The samplers' checkpoints whose weights the ranks keep; others are read again when they are sampled from."""
MOST_UNNAMED = 4
"""The unnamed weights of a model that are kept for samplers."""


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    """Tinker's interface, by which clients train and sample with loops of their own."""

    listen: str = own_flag("127.0.0.1:0", "The address of Tinker's interface, HOST:PORT.", "--serve-listen")
    base_model: str | None = own_flag(
        None, "The name by which clients ask for `--hf-model`; the folder's own if not given.", "--serve-base-model"
    )
    keys_file: Path | None = own_flag(
        None, "A file with the clients' keys, one a line; without it a key is made.", "--serve-keys-file"
    )
    tls_cert: Path | None = own_flag(
        None,
        "The file with the certificate that clients check, by `SSL_CERT_FILE` if you signed it yourself; without it "
        "nothing is encrypted.",
        "--serve-tls-cert",
    )
    tls_key: Path | None = own_flag(None, "The file with the key of `--serve-tls-cert`.", "--serve-tls-key")
    needs_provenance: bool = own_flag(
        False, "Train only on data that name the sequence that each token belongs to.", "--require-provenance"
    )
    most_models: int = own_flag(
        8, "The most models that clients may train at a time.", "--serve-most-models", bound="at least 1"
    )

    @property
    def tls(self) -> tuple[Path, Path] | None:
        """The certificate and its key."""
        return None if self.tls_cert is None or self.tls_key is None else (self.tls_cert, self.tls_key)
