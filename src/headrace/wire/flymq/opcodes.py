"""Opcodes of the specification, by name.

`Opcode` lists all of them; `table.py` has those that this release supports. 0x53 is missing in the specification but part of the
original's code of the same version. 0x80 and 0x81 are in a later version; some clients send 0xA0 and 0xA1 instead. Only Headrace has
0x0F, 0x67 to 0x6A and 0x7E.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum


class Dialect(StrEnum):
    """The specification and the original implementation differ in a few layouts.

    A connection starts in its listener's dialect. `SPEC` becomes `SDK` at the first request that only clients of the original send. `GO`
    is `SDK` with errors for the original's Go client, which nothing in its requests tells apart.
    """

    SPEC = "spec"
    SDK = "sdk"
    GO = "go"


class Opcode(IntEnum):
    PRODUCE = 0x01
    CONSUME = 0x02
    CREATE_TOPIC = 0x03
    METADATA = 0x04
    SUBSCRIBE = 0x05
    COMMIT = 0x06
    FETCH = 0x07
    LIST_TOPICS = 0x08
    DELETE_TOPIC = 0x09
    CONSUME_ZERO_COPY = 0x0A
    FETCH_BINARY = 0x0B
    BROKER = 0x0F

    REGISTER_SCHEMA = 0x10
    GET_SCHEMA = 0x11
    LIST_SCHEMAS = 0x12
    VALIDATE_SCHEMA = 0x13
    PRODUCE_WITH_SCHEMA = 0x14
    DELETE_SCHEMA = 0x15

    FETCH_DLQ = 0x20
    REPLAY_DLQ = 0x21
    PURGE_DLQ = 0x22

    PRODUCE_DELAYED = 0x30
    CANCEL_DELAYED = 0x31
    PRODUCE_WITH_TTL = 0x35

    TXN_BEGIN = 0x40
    TXN_COMMIT = 0x41
    TXN_ROLLBACK = 0x42
    TXN_PRODUCE = 0x43

    CLUSTER_JOIN = 0x50
    CLUSTER_LEAVE = 0x51
    CLUSTER_STATUS = 0x52
    CLUSTER_METADATA = 0x53

    GET_OFFSET = 0x60
    RESET_OFFSET = 0x61
    LIST_GROUPS = 0x62
    DESCRIBE_GROUP = 0x63
    GET_LAG = 0x64
    DELETE_GROUP = 0x65
    SEEK_TO_TIMESTAMP = 0x66
    GROUP_JOIN = 0x67
    GROUP_TAKE = 0x68
    GROUP_SETTLE = 0x69
    GROUP_LEAVE = 0x6A

    AUTH = 0x70
    AUTH_RESPONSE = 0x71
    WHOAMI = 0x72
    USER_CREATE = 0x73
    USER_DELETE = 0x74
    USER_UPDATE = 0x75
    USER_LIST = 0x76
    USER_GET = 0x77
    ACL_SET = 0x78
    ACL_GET = 0x79
    ACL_DELETE = 0x7A
    ACL_LIST = 0x7B
    PASSWORD_CHANGE = 0x7C
    ROLE_LIST = 0x7D
    ACCESS = 0x7E

    AUDIT_QUERY = 0x80
    AUDIT_EXPORT = 0x81
    AUDIT_QUERY_SDK = 0xA0
    AUDIT_EXPORT_SDK = 0xA1

    ERROR = 0xFF


REPLY_ONLY = frozenset({Opcode.AUTH_RESPONSE, Opcode.ERROR})
"""Opcodes that are unknown as requests."""

SPECIFIED = frozenset(Opcode) - REPLY_ONLY
"""Opcodes of requests, supported or not."""
