"""A program: an engine that only holds blocks.

    python kv_producer.py CONNECTOR NUM_TICKETS

Prints a ticket a line, then answers each line of its input with the next ticket id that was taken, until its input
ends. Ticket n covers blocks n and n + 1 of a pool that holds the pattern of `kv_world` with salt 1.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec


def main(connector: str, num_tickets: int) -> None:
    from fakes.kv_world import world_of

    world = world_of(connector)
    party = world.party("child")
    for number in range(num_tickets):
        ticket = party.publish(f"t{number}", [number, number + 1])
        print(msgspec.json.encode(ticket).decode(), flush=True)
    for _ in sys.stdin:
        print(party.next_event().ticket_id, flush=True)
    world.close()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main(sys.argv[1], int(sys.argv[2]))
