"""Liveness: does the process behind an address still run?"""

import concurrent.futures
import contextlib
import socket
import threading

__all__ = ["GRPC_GREETING", "Beacon", "silent"]

# What an HTTP/2 client says first (RFC 9113, section 3.4), and an empty
# SETTINGS frame. A gRPC server answers with its own settings.
GRPC_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(
    [0, 0, 0, 4, 0, 0, 0, 0, 0]
)
_BEACON_ANSWER = b"alive\n"


class Beacon:
    """Answers whoever connects, as long as this process runs.

    A process that is stopped (SIGSTOP) still accepts connections, its kernel
    does that, but it does not answer.

    Args:
        host: String, the name or address under which others reach this host.

    Attributes:
        address: String "host:port".
    """

    def __init__(self, host):
        self._socket = socket.create_server(("", 0))
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._answer, daemon=True).start()

    def close(self):
        """Stops answering."""
        # Closing alone would not wake the thread that waits in `accept`.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _answer(self):
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                try:
                    connection.settimeout(1.0)
                    connection.sendall(_BEACON_ANSWER)
                except OSError:
                    continue


def silent(addresses, *, greeting=b"", timeout_seconds=3.0):
    """Returns which addresses do not answer, asked all at once.

    Args:
        addresses: List of strings "host:port".
        greeting: Bytes to say first.
        timeout_seconds: Float, how long to wait for each.

    Returns:
        List of ints, places in `addresses`.
    """
    if not addresses:
        return []
    with concurrent.futures.ThreadPoolExecutor(len(addresses)) as pool:
        answers = pool.map(
            lambda address: _answers(address, greeting, timeout_seconds),
            addresses,
        )
        return [place for place, answer in enumerate(answers) if not answer]


def _answers(address, greeting, timeout_seconds):
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection(
            (host.strip("[]"), int(port)), timeout_seconds
        ) as connection:
            connection.settimeout(timeout_seconds)
            connection.sendall(greeting)
            return len(connection.recv(1)) == 1
    except OSError:
        return False
