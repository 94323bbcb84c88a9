"""The switch interval is shorter while the event loop serves large replies."""

from __future__ import annotations

import sys

from headrace.server.switching import switch_threads


def test_threads_get_the_interpreter_sooner_while_the_loop_serves_large_replies() -> None:
    before = sys.getswitchinterval()
    try:
        switch_threads()
        usual = sys.getswitchinterval()
        switch_threads(True)
        assert 0 < sys.getswitchinterval() < usual < 0.005
        switch_threads(False)
        assert sys.getswitchinterval() == usual
    finally:
        sys.setswitchinterval(before)
