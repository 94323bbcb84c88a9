"""Messages about dead letters, delay, transactions and the cluster, of every kind."""

from __future__ import annotations

from headrace.wire.flymq import advanced_messages as v
from headrace.wire.flymq.messages import AUTO, Commit, Done, Reply, Request

_PLACED = v.Placed("orders", 2, 41, 1_706_615_843_840, -1, 5)
_DETAIL = v.DlqDetail(b"k", 2, 41, 1, 2, v.NOWHERE, [v.Header("own", b"1"), v.Header("own", b"")])

REQUESTS: list[Request] = [
    Commit("orders", "readers", 1, 5, "txn-1-1"),
    v.FetchDlq("orders", 10),
    v.FetchDlq("orders", -1, "0-7", True),
    v.ReplayDlq("orders", "0-7"),
    v.ReplayDlq("orders", "0-1234"),
    v.PurgeDlq("orders"),
    v.ProduceDelayed("orders", b"value", 1_000),
    v.ProduceDelayed("orders", b"", -1, b"k", 3),
    v.CancelDelayed("1f-2"),
    v.CancelDelayed("1f-2", "orders"),
    v.ProduceWithTtl("orders", b"value", 1_000),
    v.ProduceWithTtl("orders", b"value", 0, b"k", 0),
    v.TxnBegin(),
    v.TxnBegin(5_000),
    v.TxnCommit("txn-1-1"),
    v.TxnRollback("txn-1-1"),
    v.TxnProduceBatch("txn-1-1", "orders", [b"value"]),
    v.TxnProduceBatch("txn-1-1", "orders", [b"", b"two", b"three"], [None, b"k", None], [AUTO, AUTO, 3]),
    v.TxnProduceBatch("txn-1-1", "other", [b"%d" % number for number in range(30)]),
    v.TxnProduceBatch("txn-1-2", "other", [b"x"], None, [0]),
    v.ClusterJoin("10.0.0.7:9093"),
    v.ClusterLeave(),
    v.ClusterStatus(),
    v.BrokerCall("topic.list", b"{}"),
]

REPLIES: list[tuple[int, Reply]] = [
    (0x20, v.DlqEntries([])),
    (0x20, v.DlqEntries([v.DlqEntry("0-7", b"value", "timed out", 3)], [_DETAIL])),
    (0x21, Done(True, "OK")),
    (0x22, Done(True, "OK")),
    (0x30, v.Scheduled("orders", 0, 0, 1, -1, 5, "1f-2", 1_706_615_843_840)),
    (0x31, Done(True, "OK")),
    (0x35, _PLACED),
    (0x40, v.TxnBegun("txn-1-1")),
    (
        0x41,
        v.TxnEnded(
            "txn-1-1",
            True,
            [v.PlacedBatch("orders", [2, 2], [41, 42], [1, 2], [-1, 3], [5, 6]), v.PlacedBatch("other", [0], [0], [1], [-1], [0])],
        ),
    ),
    (0x42, v.TxnEnded("txn-1-1")),
    (0x43, _PLACED),
    (0x50, Done(False, "no")),
    (0x51, Done(False, "no")),
    (0x52, v.ClusterReport("c", "n", 1, 7, 1, 2, 5, [v.ClusterNode("n", "h:1", "", "online", "leader", True, "5s")])),
    (0x0F, v.BrokerReply(b"[]")),
]
