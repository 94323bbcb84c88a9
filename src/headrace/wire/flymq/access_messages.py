"""Messages about logins, users, ACLs and the audit log. `table.py` has the layouts.

The repr of a message never contains a password.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Auth:
    user: str
    password: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class WhoAmI:
    pass


@dataclass(frozen=True, slots=True)
class UserCreate:
    user: str
    password: str = field(repr=False)
    old_password: str = field(default="", repr=False)
    roles: list[str] = field(default_factory=list)
    enabled: bool = True


@dataclass(frozen=True, slots=True)
class UserUpdate(UserCreate):
    """Overwrite roles and `enabled`."""


@dataclass(frozen=True, slots=True)
class PasswordChange(UserCreate):
    """Change one's own password with the old one, or any password as an administrator."""


@dataclass(frozen=True, slots=True)
class UserDelete:
    user: str


@dataclass(frozen=True, slots=True)
class UserGet:
    user: str


@dataclass(frozen=True, slots=True)
class UserList:
    pass


@dataclass(frozen=True, slots=True)
class AclSet:
    topic: str
    public: bool
    users: list[str]
    roles: list[str]


@dataclass(frozen=True, slots=True)
class AclGet:
    topic: str


@dataclass(frozen=True, slots=True)
class AclDelete:
    topic: str


@dataclass(frozen=True, slots=True)
class AclList:
    pass


@dataclass(frozen=True, slots=True)
class RoleList:
    pass


@dataclass(frozen=True, slots=True)
class AccessCall:
    """An operation that only Headrace has, with its arguments in JSON."""

    operation: str
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class AuditQuery:
    start: int = 0
    end: int = 0
    types: list[str] = field(default_factory=list)
    user: str = ""
    resource: str = ""
    result: str = ""
    search: str = ""
    limit: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True)
class AuditExport:
    query: AuditQuery
    format: str


@dataclass(frozen=True, slots=True)
class AuditQuerySdk(AuditQuery):
    """`AuditQuery` under the opcode that some clients of the original use."""


@dataclass(frozen=True, slots=True)
class AuditExportSdk(AuditExport):
    """`AuditExport` under the opcode that some clients of the original use."""


# Replies.


@dataclass(frozen=True, slots=True)
class AuthReply:
    success: bool
    error: str = ""
    user: str = ""
    roles: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of this connection."""

    authenticated: bool
    user: str
    roles: list[str]
    permissions: list[str]


@dataclass(frozen=True, slots=True)
class UserEntry:
    user: str
    roles: list[str]
    permissions: list[str]
    enabled: bool
    created: int
    updated: int


@dataclass(frozen=True, slots=True)
class UserEntries:
    users: list[UserEntry]


@dataclass(frozen=True, slots=True)
class AclDone:
    success: bool
    topic: str


@dataclass(frozen=True, slots=True)
class AclEntry:
    topic: str
    exists: bool
    public: bool
    default_public: bool
    users: list[str]
    roles: list[str]


@dataclass(frozen=True, slots=True)
class AclRow:
    topic: str
    exists: bool
    public: bool
    users: list[str]
    roles: list[str]


@dataclass(frozen=True, slots=True)
class AclEntries:
    acls: list[AclRow]
    default_public: bool


@dataclass(frozen=True, slots=True)
class RoleEntry:
    role: str
    permissions: list[str]
    description: str


@dataclass(frozen=True, slots=True)
class RoleEntries:
    roles: list[RoleEntry]


@dataclass(frozen=True, slots=True)
class AccessReply:
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Detail:
    name: str
    value: str


@dataclass(frozen=True, slots=True)
class AuditEvent:
    id: str
    time: int
    type: str
    user: str
    address: str
    resource: str
    action: str
    result: str
    node: str
    details: list[Detail]


@dataclass(frozen=True, slots=True)
class AuditPage:
    events: list[AuditEvent]
    total: int
    more: bool


@dataclass(frozen=True, slots=True)
class AuditFile:
    format: str
    content: bytes


AccessRequest: TypeAlias = (
    Auth
    | WhoAmI
    | UserCreate
    | UserUpdate
    | PasswordChange
    | UserDelete
    | UserGet
    | UserList
    | AclSet
    | AclGet
    | AclDelete
    | AclList
    | RoleList
    | AccessCall
    | AuditQuery
    | AuditExport
)
AccessReplies: TypeAlias = (
    AuthReply | Identity | UserEntry | UserEntries | AclDone | AclEntry | AclEntries | RoleEntries | AccessReply | AuditPage | AuditFile
)
