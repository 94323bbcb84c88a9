"""Settings of a Kafka listener with TLS and SASL, the user that may log in there, and the settings of a broker that does."""

from __future__ import annotations

import base64
import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from confluent_kafka.admin import (  # type: ignore[attr-defined]  # the package re-exports them without saying so
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from headrace.kafka_server import Cluster
from headrace.server import certificates
from tests.canaries import secret

USER: Final = "headrace"
PASSWORD: Final = secret("kafka-password")
MECHANISMS: Final = ("plain", "scram-sha-256", "scram-sha-512", "oauthbearer")
_LOGIN: Final = "org.apache.kafka.common.security"
_SECONDS: Final = 60.0


def listener(folder: Path) -> dict[str, str]:
    """Create certificates in `folder` and return the settings of the listener, which asks clients for a certificate, too."""
    certificates.init(folder, ["127.0.0.1"], datetime.now(UTC))
    certificates.client(folder, USER, datetime.now(UTC))
    both = folder / "server-with-key.pem"
    both.write_text((folder / "server.key").read_text() + (folder / "server.pem").read_text())
    scram = f"{_LOGIN}.scram.ScramLoginModule required;"
    return {
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(both),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(folder / "ca.pem"),
        "ssl.client.auth": "required",
        "sasl.enabled.mechanisms": ",".join(name.upper() for name in MECHANISMS),
        "plain.sasl.jaas.config": f'{_LOGIN}.plain.PlainLoginModule required user_{USER}="{PASSWORD}";',
        "scram-sha-256.sasl.jaas.config": scram,
        "scram-sha-512.sasl.jaas.config": scram,
        "oauthbearer.sasl.jaas.config": f'{_LOGIN}.oauthbearer.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="kafka";',
    }


def create_user(cluster: Cluster) -> None:
    """Create the SCRAM credentials of the user, over the listener without SASL."""
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap, "log_level": 0})
    for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):
        upsertion = UserScramCredentialUpsertion(USER, ScramCredentialInfo(mechanism, 4096), PASSWORD.encode())
        admin.alter_user_scram_credentials([upsertion])[USER].result(_SECONDS)


def token() -> str:
    """Return a token for OAUTHBEARER without a signature, which Kafka accepts unless it is told whom to ask."""
    now = int(time.time())
    parts = ({"alg": "none"}, {"sub": USER, "iat": now, "exp": now + 3600})
    return ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in parts) + "."


def settings(cluster: Cluster, ca: Path, mechanism: str = "scram-sha-512") -> dict[str, str]:
    """Return the keys of section `kafka`. The password is in the variable KAFKA_PASSWORD."""
    login = {} if mechanism == "oauthbearer" else {"user": USER}
    place = {"bootstrap": cluster.secured_bootstrap, "tls": "true", "tls_ca": str(ca)}
    folder = cluster.nodes[0].folder.parent / "certificates"
    certificate = {"tls_certificate": str(folder / f"{USER}.pem"), "tls_key": str(folder / f"{USER}.key")}
    return {**place, **certificate, "sasl": mechanism, "password": "env:KAFKA_PASSWORD", **login}
