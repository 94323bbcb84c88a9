"""Messages about access, of every kind."""

from __future__ import annotations

from headrace.wire.flymq import access_messages as a
from headrace.wire.flymq.messages import Done, Reply, Request

_QUERY = a.AuditQuery(1, 2, ["login", "user"], "ann", "user:bob", "failure", "10.0.0.7", 50, 100)
_ENTRY = a.UserEntry("ann", ["admin"], ["admin", "read", "write"], True, 1_706_615_843, 1_706_615_844)
_EVENT = a.AuditEvent(
    "7", 1_706_615_843_840, "login", "ann", "10.0.0.7", "user:ann", "login", "success", "headrace", [a.Detail("protocol", "flymq")]
)

REQUESTS: list[Request] = [
    a.Auth("ann", "pässword"),
    a.WhoAmI(),
    a.UserCreate("bob", "a secret", "", ["producer", "consumer"]),
    a.UserCreate("bob", "a secret", "", [], False),
    a.UserDelete("bob"),
    a.UserUpdate("bob", "", "", ["guest"], False),
    a.UserList(),
    a.UserGet("bob"),
    a.AclSet("orders", True, ["ann"], ["producer"]),
    a.AclGet("orders"),
    a.AclDelete("orders"),
    a.AclList(),
    a.PasswordChange("bob", "new secret", "old secret"),
    a.RoleList(),
    a.AccessCall("key.list", b"{}"),
    a.AuditQuery(),
    _QUERY,
    a.AuditExport(_QUERY, "csv"),
    a.AuditQuerySdk(0, 0, [], "ann"),
    a.AuditExportSdk(a.AuditQuery(), "json"),
]

REPLIES: list[tuple[int, Reply]] = [
    (0x70, a.AuthReply(True, "", "ann", ["admin", "sdk"])),
    (0x70, a.AuthReply(False, "invalid username or password")),
    (0x72, a.Identity(False, "anonymous", [], [])),
    (0x73, _ENTRY),
    (0x74, Done(True, "bob")),
    (0x75, Done(True, "bob")),
    (0x76, a.UserEntries([_ENTRY, a.UserEntry("bob", [], [], False, 0, 0)])),
    (0x77, _ENTRY),
    (0x78, a.AclDone(True, "orders")),
    (0x79, a.AclEntry("orders", True, False, True, ["ann"], [])),
    (0x7A, a.AclDone(True, "orders")),
    (0x7B, a.AclEntries([a.AclRow("orders", True, True, ["ann"], ["producer"])], False)),
    (0x7C, Done(True, "password changed")),
    (0x7D, a.RoleEntries([a.RoleEntry("guest", [], "nothing")])),
    (0x7E, a.AccessReply(b"[]")),
    (0x80, a.AuditPage([_EVENT, _EVENT], 9, True)),
    (0x81, a.AuditFile("csv", b"id\n7\n")),
    (0xA0, a.AuditPage([], 0, False)),
    (0xA1, a.AuditFile("json", b"[]")),
]
