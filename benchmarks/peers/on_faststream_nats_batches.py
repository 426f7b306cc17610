"""FastStream on JetStream, one handler run a batch: all of its messages are acknowledged, or none."""

from __future__ import annotations

from faststream.nats import NatsBroker, PullSub
from harness import main
from on_faststream_nats import SUBJECT, FastStreamNats, stream


class FastStreamNatsBatches(FastStreamNats):
    note = "a pull subscriber with batch=True: one handler run for all messages of a batch, unconfirmed acks, uvloop"
    concurrency = (100, 1_000)

    def subscribe(self, broker: NatsBroker, handle, concurrency: int) -> None:
        pull = PullSub(batch_size=concurrency, timeout=1.0, batch=True)

        @broker.subscriber(SUBJECT, stream=stream(), pull_sub=pull, durable="job")
        async def jobs(bodies: list[str]) -> None:
            for body in bodies:
                handle(body)


if __name__ == "__main__":
    main(FastStreamNatsBatches)
