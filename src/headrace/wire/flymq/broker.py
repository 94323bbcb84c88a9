"""Layout of BROKER (0x0F), an opcode that only Headrace has.

BROKER   operation s16, arguments b32 (JSON)    → result b32 (JSON)
"""

from __future__ import annotations

from headrace.wire.flymq.advanced_messages import BrokerCall, BrokerReply
from headrace.wire.flymq.fields import B32, S16, Layout

BROKER = Layout(BrokerCall, operation=S16, body=B32)
BROKER_REPLY = Layout(BrokerReply, body=B32)
