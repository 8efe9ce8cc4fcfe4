"""A CONNECT-UDP client (RFC 9298) on aioquic: sends words to a target and prints what comes
back.

    connect_udp.py GATEWAY PORT TOKEN TARGET TARGET_PORT WORD...

Prints the status of the answer, then each datagram that came back, a line each.
"""

import asyncio
import ssl
import sys
from urllib.parse import quote

from aioquic.asyncio import connect
from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.h3.connection import H3_ALPN, H3Connection
from aioquic.h3.events import DatagramReceived, HeadersReceived
from aioquic.quic.configuration import QuicConfiguration

WAIT = 30  # seconds, for each step


class Client(QuicConnectionProtocol):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # What it calls WebTransport are the settings of extended CONNECT and datagrams.
        self.http = H3Connection(self._quic, enable_webtransport=True)
        self.status = asyncio.get_running_loop().create_future()
        self.datagrams = asyncio.Queue()

    def quic_event_received(self, event):
        for e in self.http.handle_event(event):
            if isinstance(e, HeadersReceived) and not self.status.done():
                self.status.set_result(dict(e.headers)[b":status"].decode())
            elif isinstance(e, DatagramReceived):
                self.datagrams.put_nowait(e.data)

    def ask(self, authority, path, token):
        stream = self._quic.get_next_available_stream_id()
        self.http.send_headers(stream, [
            (b":method", b"CONNECT"),
            (b":protocol", b"connect-udp"),
            (b":scheme", b"https"),
            (b":authority", authority.encode()),
            (b":path", path.encode()),
            (b"capsule-protocol", b"?1"),
            (b"proxy-authorization", b"Bearer " + token.encode()),
        ])
        self.transmit()
        return stream


async def main(gateway, port, token, target, target_port, *words):
    configuration = QuicConfiguration(
        alpn_protocols=H3_ALPN, is_client=True, max_datagram_frame_size=65536, verify_mode=ssl.CERT_NONE,
        server_name="vpn.test",
    )
    async with connect(gateway, int(port), configuration=configuration, create_protocol=Client) as client:
        path = f"/.well-known/masque/udp/{quote(target, safe='')}/{target_port}/"
        stream = client.ask(f"{gateway}:{port}", path, token)
        status = await asyncio.wait_for(client.status, WAIT)
        print(status)
        if status != "200":
            return
        for word in words:
            client.http.send_datagram(stream, b"\0" + word.encode())  # context 0: a UDP payload
            client.transmit()
            data = await asyncio.wait_for(client.datagrams.get(), WAIT)
            assert data[0] == 0, data
            print(data[1:].decode())


asyncio.run(main(*sys.argv[1:]))
