"""Layouts of logins, users, ACLs, the audit log (0x70–0x7E, 0x80, 0x81), of BROKER (0x0F) and of their replies.

    AUTH              user s16, password s16                                          → 0x71, see below
    WHOAMI            –                                                               → bool, user s16, roles, permissions
    USER_CREATE       user s16, password s16, old password s16, roles, [enabled bool] → user entry
    USER_DELETE       user s16                                                        → done
    USER_UPDATE       as USER_CREATE; the passwords are ignored                       → done
    USER_LIST         –                                                               → list of user entries
    USER_GET          user s16                                                        → user entry
    ACL_SET           topic s16, public bool, users, roles                            → bool, topic s16
    ACL_GET           topic s16                                                       → topic s16, flags, users, roles
    ACL_DELETE        topic s16                                                       → bool, topic s16
    ACL_LIST          –                                                               → list of (topic s16, flags, users, roles), bool
    PASSWORD_CHANGE   as USER_CREATE: user, new password, old password                → done
    ROLE_LIST         –                                                               → list of (role s16, permissions, text s16)
    ACCESS            operation s16, body b32 (JSON)                                  → body b32 (JSON)
    BROKER            operation s16, body b32 (JSON)                                  → body b32 (JSON)
    AUDIT_QUERY       query                                                           → list of (u32 size, event), total i32, more bool
    AUDIT_EXPORT      u32 size, query, format s16                                     → format s16, content b32

The flags of an ACL are bools: it exists, the topic is public, topics without an ACL are public; in ACL_LIST the last one appears once, at
the end. Roles, users and permissions are lists of s16. A user entry is user s16, roles, permissions, enabled bool, created i64, updated i64
(Unix seconds). AUTH is answered with `success bool, error s16, user s16, list of role s16`; the original answers `success bool, user s16,
list of role s8, error s16`. A query is start i64, end i64 (Unix seconds, 0: open), types list of s16, user s16, resource s16, result s16,
search s16, limit i32, offset i32; an event is id s16, time i64 (Unix ms), type, user, address, resource, action, result, node (all s16),
list of (name s16, value s16). 0xA0 and 0xA1 mean the same as 0x80 and 0x81. Only Headrace has ACCESS and BROKER.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from headrace.errors import WireError
from headrace.wire.flymq.access_messages import (
    AccessCall,
    AccessReply,
    AclDelete,
    AclDone,
    AclEntries,
    AclEntry,
    AclGet,
    AclList,
    AclRow,
    AclSet,
    AuditEvent,
    AuditExport,
    AuditExportSdk,
    AuditFile,
    AuditPage,
    AuditQuery,
    AuditQuerySdk,
    Auth,
    AuthReply,
    Detail,
    Identity,
    PasswordChange,
    RoleEntries,
    RoleEntry,
    RoleList,
    UserCreate,
    UserDelete,
    UserEntries,
    UserEntry,
    UserGet,
    UserList,
    UserUpdate,
    WhoAmI,
)
from headrace.wire.flymq.advanced_messages import BrokerCall, BrokerReply
from headrace.wire.flymq.fields import B32, BOOL, I32, I64, S8, S16, U32, Field, Layout, Reader, Repeated, Trailing

T = TypeVar("T")


class Sized(Generic[T]):
    """A u32 size, then a field of that many bytes. Bytes after the field are ignored."""

    def __init__(self, inner: Field[T]) -> None:
        self._inner = inner

    def read(self, reader: Reader, /) -> T:
        size = U32.read(reader)
        if size > reader.left:
            raise WireError(f"{size} bytes announced, {reader.left} left")
        inside = Reader(reader.payload, reader.at, reader.at + size)
        reader.at += size
        return self._inner.read(inside)

    def write(self, value: T, /) -> bytes:
        return B32.write(self._inner.write(value))


NAMES = Repeated(S16)
_USER: dict[str, Field[Any]] = {
    "user": S16,
    "password": S16,
    "old_password": S16,
    "roles": NAMES,
    "enabled": Trailing(BOOL, True, always=True),
}

AUTH = Layout(Auth, user=S16, password=S16)
WHOAMI = Layout(WhoAmI)
USER_CREATE = Layout(UserCreate, **_USER)
USER_UPDATE = Layout(UserUpdate, **_USER)
PASSWORD_CHANGE = Layout(PasswordChange, **_USER)
USER_DELETE = Layout(UserDelete, user=S16)
USER_GET = Layout(UserGet, user=S16)
USER_LIST = Layout(UserList)
ACL_SET = Layout(AclSet, topic=S16, public=BOOL, users=NAMES, roles=NAMES)
ACL_GET = Layout(AclGet, topic=S16)
ACL_DELETE = Layout(AclDelete, topic=S16)
ACL_LIST = Layout(AclList)
ROLE_LIST = Layout(RoleList)
ACCESS = Layout(AccessCall, operation=S16, body=B32)
BROKER = Layout(BrokerCall, operation=S16, body=B32)
BROKER_REPLY = Layout(BrokerReply, body=B32)
_QUERY: dict[str, Field[Any]] = {
    "start": I64,
    "end": I64,
    "types": NAMES,
    "user": S16,
    "resource": S16,
    "result": S16,
    "search": S16,
    "limit": I32,
    "offset": I32,
}
AUDIT_QUERY = Layout(AuditQuery, **_QUERY)
AUDIT_QUERY_SDK = Layout(AuditQuerySdk, **_QUERY)
AUDIT_EXPORT = Layout(AuditExport, query=Sized(AUDIT_QUERY), format=S16)
AUDIT_EXPORT_SDK = Layout(AuditExportSdk, query=Sized(AUDIT_QUERY), format=S16)

AUTH_REPLY = Layout(AuthReply, success=BOOL, error=S16, user=S16, roles=NAMES)
AUTH_REPLY_SDK = Layout(AuthReply, success=BOOL, user=S16, roles=Repeated(S8), error=S16)
IDENTITY = Layout(Identity, authenticated=BOOL, user=S16, roles=NAMES, permissions=NAMES)
USER_ENTRY = Layout(UserEntry, user=S16, roles=NAMES, permissions=NAMES, enabled=BOOL, created=I64, updated=I64)
USER_ENTRIES = Layout(UserEntries, users=Repeated(USER_ENTRY))
ACL_DONE = Layout(AclDone, success=BOOL, topic=S16)
ACL_ENTRY = Layout(AclEntry, topic=S16, exists=BOOL, public=BOOL, default_public=BOOL, users=NAMES, roles=NAMES)
_ACL_ROW = Layout(AclRow, topic=S16, exists=BOOL, public=BOOL, users=NAMES, roles=NAMES)
ACL_ENTRIES = Layout(AclEntries, acls=Repeated(_ACL_ROW), default_public=BOOL)
ROLE_ENTRIES = Layout(RoleEntries, roles=Repeated(Layout(RoleEntry, role=S16, permissions=NAMES, description=S16)))
ACCESS_REPLY = Layout(AccessReply, body=B32)
_DETAIL = Layout(Detail, name=S16, value=S16)
_EVENT = Layout(
    AuditEvent,
    id=S16,
    time=I64,
    type=S16,
    user=S16,
    address=S16,
    resource=S16,
    action=S16,
    result=S16,
    node=S16,
    details=Repeated(_DETAIL),
)
AUDIT_PAGE = Layout(AuditPage, events=Repeated(Sized(_EVENT)), total=I32, more=BOOL)
AUDIT_FILE = Layout(AuditFile, format=S16, content=B32)
