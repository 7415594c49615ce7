"""overlap="forward": step() returns while messages are on the way, and the next forward waits.

Opt-in, and in this folder alone. It is the only way in which a message that needs its gradient can
hide behind a whole iteration. The price: parameters change their class until their values are
there, and what reads one outside of torch's Python functions may see an old value, or one in the
midst of its update.

    parameter.py  a parameter whose value is awaited: whoever reads it waits
    updates.py    the updates that wait for their mixes, by the worker or by whoever reads first
    wire.py       messages in pieces, those of the first layers before others
"""

from __future__ import annotations

from decentlam.runtime.forward.updates import Forward as Forward
from decentlam.runtime.forward.wire import PIECE_BYTES as PIECE_BYTES
from decentlam.runtime.forward.wire import PriorityWire as PriorityWire
