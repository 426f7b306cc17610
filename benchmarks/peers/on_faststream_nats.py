"""FastStream on JetStream: a stream in files and a durable pull consumer, one handler run a message."""

from __future__ import annotations

import asyncio

from faststream.nats import JStream, NatsBroker, PullSub
from harness import Peer, main
from nats.js.api import RetentionPolicy, StorageType

SUBJECT = "peer.jobs"
STREAM = "peer"


def stream() -> JStream:
    return JStream(STREAM, subjects=[SUBJECT], retention=RetentionPolicy.WORK_QUEUE, storage=StorageType.FILE)


class FastStreamNats(Peer):
    packages = ("faststream", "nats-py", "uvloop")
    note = "work-queue stream in files, durable pull consumer, unconfirmed acks, uvloop; 1,000 publications at once for bulk"
    concurrency = (1, 100, 1_000)

    async def open(self) -> None:
        self.broker = NatsBroker(self.url, logger=None)
        self.broker.subscriber(SUBJECT, stream=stream(), pull_sub=True, durable="job")  # which declares the stream
        await self.broker.connect()
        streams = self.broker.config.connection_state.stream
        await streams.add_stream(stream().config, subjects=[SUBJECT])

    async def close(self) -> None:
        await self.broker.stop()

    async def send(self, body: str) -> None:
        await self.broker.publish(body, SUBJECT, stream=STREAM, timeout=30)

    async def send_many(self, bodies: list[str]) -> None:
        await asyncio.gather(*[self.send(body) for body in bodies])

    def subscribe(self, broker: NatsBroker, handle, concurrency: int) -> None:
        pull = PullSub(batch_size=concurrency)

        @broker.subscriber(SUBJECT, stream=stream(), pull_sub=pull, durable="job")
        async def job(body: str) -> None:
            handle(body)

    async def work(self, handle, concurrency: int) -> None:
        broker = NatsBroker(self.url, logger=None)
        self.subscribe(broker, handle, concurrency)
        await broker.start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    main(FastStreamNats)
