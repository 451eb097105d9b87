"""A streaming server that writes into each token when it was written: the truth for client accuracy tests.

The first token's text also holds when the request had arrived. A process of its own, as servers are.

Usage: `python truth_server.py TTFT_S GAP_S NUM_TOKENS` prints its port and serves until killed.
"""

from __future__ import annotations

import asyncio
import sys
import time


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    ttft_s, gap_s, num_tokens = float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
            arrived_ns = time.monotonic_ns()
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            for index in range(num_tokens):
                deadline_s = arrived_ns / 1e9 + ttft_s + gap_s * index
                await asyncio.sleep(deadline_s - time.monotonic())
                stamp = f"{arrived_ns} " * (index == 0) + f"{time.monotonic_ns()} "
                finish = '"stop"' if index == num_tokens - 1 else "null"
                choice = f'{{"index":0,"text":"{stamp}","finish_reason":{finish}}}'
                event = f'data: {{"choices":[{choice}]}}\n\n'.encode()
                writer.write(b"%x\r\n%s\r\n" % (len(event), event))
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def serve() -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


asyncio.run(serve())
