"""How a message gets mixed: one interface, and one file for each way."""

from __future__ import annotations

from decentlam.exchange.base import Exchange as Exchange
from decentlam.exchange.base import Pending as Pending
from decentlam.exchange.base import Terms as Terms
from decentlam.exchange.base import combine as combine
from decentlam.exchange.neighbors import neighbor_exchange as neighbor_exchange
from decentlam.exchange.network import Network as Network
from decentlam.exchange.network import connect as connect
