"""One request's output as it is written: for a thread, and for an event loop."""

import asyncio
import ctypes
import os
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Any

from slipstream import _core
from slipstream._core import Chunk, DeviceError, Stats

_POLL_SECONDS = 0.1  # how soon a pump sees that its event loop is gone


class Owner:
    """The process that built something: threads do not survive a fork, so no other may use it."""

    def __init__(self, what: str, core: Any) -> None:
        """Notes the process.

        Args:
            what: What was built, for the message.
            core: The core's object, which must not be ended in a forked child.
        """
        self.what = what
        self.core = core
        self.process_id = os.getpid()
        _owners.add(self)

    def is_here(self) -> bool:
        """Whether this is the process that built it."""
        return os.getpid() == self.process_id

    def check(self) -> None:
        """Refuses a use in another process.

        Raises:
            DeviceError: If this is not the process that built it.
        """
        if not self.is_here():
            raise DeviceError(
                f"{self.what} was built in process {self.process_id} and cannot be used in process {os.getpid()}\n"
                "hint: build the engine in the process that uses it, after forking"
            )


_owners: "weakref.WeakSet[Owner]" = weakref.WeakSet()


def _abandon_inherited() -> None:
    """In a forked child: keeps what was inherited alive for ever, since ending it would wait for a missing thread."""
    for owner in list(_owners):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner.core))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_inherited)


class TokenStream(Iterator[Chunk]):
    """The chunks of one request, in order; iterate over it, or use it as a context manager.

    Closing it, losing it, or an exception while waiting (Ctrl-C too) cancels the request.
    """

    def __init__(self, core: _core.TokenStream, engine: object) -> None:
        """Wraps a request that was submitted.

        Args:
            core: The core's stream.
            engine: Kept alive as long as the stream.
        """
        self._owner = Owner("token stream", core)
        self._core = core
        self._engine = engine

    def __next__(self) -> Chunk:
        """Waits for the next chunk."""
        self._owner.check()
        try:
            return next(self._core)
        except StopIteration:
            raise
        except BaseException:
            self._core.close()
            raise

    def close(self) -> None:
        """Cancels the request. Idempotent; safe from any thread."""
        if self._owner.is_here():
            self._core.close()

    @property
    def seed(self) -> int:
        """The seed in use, drawn from the system if none was given."""
        return self._core.seed

    @property
    def stats(self) -> Stats | None:
        """The request's counts; ``None`` before its end."""
        return self._core.stats

    def __enter__(self) -> "TokenStream":
        """The stream itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancels what has not ended."""
        self.close()


class _Mailbox:
    """What the pump has brought to the event loop. Only the loop's thread touches it."""

    def __init__(self) -> None:
        self.items: deque[Chunk | BaseException | None] = deque()
        self.waiter: asyncio.Future[None] | None = None

    def put(self, item: Chunk | BaseException | None) -> None:
        self.items.append(item)
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


def _pump(core: _core.TokenStream, loop: asyncio.AbstractEventLoop, mailbox: _Mailbox) -> None:
    """Carries chunks to the loop until the request or the loop ends; ``None`` is the end."""
    item: Chunk | BaseException | None
    is_last = False
    while not is_last:
        try:
            item = core.poll(_POLL_SECONDS)
            if item is None:
                if loop.is_closed():
                    core.close()
                    return
                continue
        except StopIteration:
            item, is_last = None, True
        except BaseException as error:  # handed to the consumer, whatever it is
            item, is_last = error, True
        try:
            loop.call_soon_threadsafe(mailbox.put, item)
        except RuntimeError:  # the loop was closed
            core.close()
            return


class AsyncTokenStream(AsyncIterator[Chunk]):
    """The chunks of one request, in order, for an event loop; also an asynchronous context manager.

    Closing it, losing it, or cancelling the task that waits for it cancels the request.
    """

    def __init__(self, core: _core.TokenStream, engine: object) -> None:
        """Wraps a request that was submitted.

        Args:
            core: The core's stream.
            engine: Kept alive as long as the stream.
        """
        self._owner = Owner("token stream", core)
        self._core = core
        self._engine = engine
        self._mailbox = _Mailbox()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_over = False

    async def __anext__(self) -> Chunk:
        """Waits for the next chunk."""
        self._owner.check()
        if self._is_over:
            raise StopAsyncIteration
        loop = self._start()
        try:
            item = await self._receive(loop)
        except BaseException:
            self._end()
            raise
        if isinstance(item, BaseException):
            self._end()
            raise item
        if item is None:
            self._is_over = True
            raise StopAsyncIteration
        return item

    def _start(self) -> asyncio.AbstractEventLoop:
        """The loop that runs, with the pump at work for it."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            name = f"slipstream-pump-{self._core.request_id}"
            threading.Thread(target=_pump, args=(self._core, loop, self._mailbox), name=name, daemon=True).start()
        if loop is not self._loop:
            raise RuntimeError("the stream belongs to another event loop")
        if self._mailbox.waiter is not None:
            raise RuntimeError("another task is waiting for this stream's next chunk")
        return loop

    async def _receive(self, loop: asyncio.AbstractEventLoop) -> Chunk | BaseException | None:
        mailbox = self._mailbox
        while not mailbox.items:
            mailbox.waiter = loop.create_future()
            try:
                await mailbox.waiter
            finally:
                mailbox.waiter = None
        return mailbox.items.popleft()

    def _end(self) -> None:
        self._is_over = True
        if self._owner.is_here():
            self._core.close()

    async def aclose(self) -> None:
        """Cancels the request. Idempotent."""
        self._end()

    @property
    def seed(self) -> int:
        """The seed in use, drawn from the system if none was given."""
        return self._core.seed

    @property
    def stats(self) -> Stats | None:
        """The request's counts; ``None`` before its end."""
        return self._core.stats

    async def __aenter__(self) -> "AsyncTokenStream":
        """The stream itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancels what has not ended."""
        self._end()

    def __del__(self) -> None:
        """Cancels what has not ended: the pump keeps the core's stream alive."""
        if hasattr(self, "_is_over"):
            self._end()
