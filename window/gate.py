"""The gate before the server: who may ask, how much, how many at once, and for how long."""
import asyncio
import hmac

from fastapi.requests import Request
from starlette.requests import ClientDisconnect

from window.requests import Refusal

BODY = 2**22  # bytes of a request
BODY_SECONDS = 30  # until they must have come
SECONDS = 600  # until a request must have been answered
REQUESTS = 256  # at the same time
HEALTH = "/healthz", "/health"  # may be asked without a token; the second is vLLM's name for it


class Gate:
    """An ASGI application around another one.

    A request whose client leaves, or whose time is over, is cancelled: its rows leave the engine.
    """

    def __init__(self, app, token: str | None):
        self.app = app
        self.token = token
        self.running = 0

    async def __call__(self, scope, receive, send):
        self.running += 1
        try:
            body = await self.admit(scope, receive)
            await self.answer(body, scope, receive, send)
        except ClientDisconnect:
            pass
        except Refusal as refusal:
            await refusal.response()(scope, receive, send)
        finally:
            self.running -= 1

    async def admit(self, scope, receive) -> bytes:
        """Return the body of a request, or raise Refusal."""
        given = dict(scope["headers"]).get(b"authorization", b"")
        wanted = f"Bearer {self.token}".encode()
        if self.token and scope["path"] not in HEALTH and not hmac.compare_digest(given, wanted):
            raise Refusal(401, "the token is missing or wrong", "invalid_api_key")
        if self.running > REQUESTS:
            raise Refusal(429, f"{REQUESTS} requests are being answered; try again later",
                          "rate_limit_exceeded")
        body = bytearray()
        size = 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in Request(scope, receive).stream():
                    size += len(chunk)
                    # One that is too long is read to its end, or the client would not see why.
                    if size <= BODY:
                        body += chunk
        except TimeoutError:
            raise Refusal(408, f"the body did not come within {BODY_SECONDS} s") from None
        if size > BODY:
            raise Refusal(413, f"the body has more than {BODY} bytes")
        return bytes(body)

    async def answer(self, body, scope, receive, send):
        """Run the application until it has answered, the client has left or the time is over."""
        messages = asyncio.Queue()
        messages.put_nowait({"type": "http.request", "body": body})
        started = asyncio.Event()

        async def note(message):
            started.set()
            await send(message)
        work = asyncio.ensure_future(self.app(scope, messages.get, note))
        # After the body comes only one message: that the client has left.
        left = asyncio.ensure_future(receive())
        try:
            await asyncio.wait([work, left], timeout=SECONDS, return_when="FIRST_COMPLETED")
            if work.done():
                work.result()
            elif not left.done() and not started.is_set():
                raise Refusal(408, f"not answered within {SECONDS} s", "timeout")
        finally:
            work.cancel()
            left.cancel()
