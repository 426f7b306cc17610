"""A web app and its worker in one process.

    uvicorn orders:app

    curl -X POST http://127.0.0.1:8000/orders -H 'Content-Type: application/json' -d '{"item": "lamp"}'
    curl http://127.0.0.1:8000/orders
    curl http://127.0.0.1:8000/worker/health/ready

Ctrl-C stops the requests first, then the worker, which finishes what it has in hand. The queue is ``orders.db`` in the
working directory; what is left in it is packed at the next start. Needs ``pip install fastapi``.
"""

from __future__ import annotations

from dataclasses import dataclass

import anyio
from fastapi import FastAPI

from mainspring import Context, LoopGroup, MainLoop, open_mailbox
from mainspring.http.app import health_app


@dataclass
class Order:
    """The message, and the body of the request."""

    item: str
    quantity: int = 1


packed: dict[str, Order] = {}


async def pack(order: Order, ctx: Context) -> None:
    """The worker: a tenth of a second an item. Doing it twice changes nothing, since the order's id is the key."""
    await anyio.sleep(0.1 * order.quantity)
    packed[ctx.request_id] = order


orders = open_mailbox("sqlite:///orders.db?name=orders", body=Order)
group = LoopGroup([MainLoop(orders, pack, concurrency=4)], name="packing")

app = FastAPI(lifespan=group.lifespan)
app.mount("/worker", health_app(group, loopback=False))


@app.post("/orders", status_code=202)
async def accept(order: Order) -> dict[str, str]:
    """Answer as soon as the order is on disk."""
    return {"id": await orders.send(order)}


@app.get("/orders")
async def show() -> dict[str, object]:
    """What is packed, and how many wait."""
    return {"packed": packed, "waiting": await orders.approximate_count()}
