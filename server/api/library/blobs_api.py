"""Serve `/api/blobs`: take the files that `/api/create` imports, streamed to the disk."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response
from starlette.requests import ClientDisconnect

from moeinf.runtime.library.blobs import Blobs, Upload
from moeinf.server.http.refusals import BodiesTooLong

MOST_UPLOADS = 4  # at a time
_WRITE_BYTES = 4 << 20  # one write, on a thread

router = APIRouter()


@router.head("/api/blobs/{digest}", include_in_schema=False)
async def has_blob(digest: str, request: Request) -> Response:
    """Answer 200 if the file has been uploaded, else 404."""
    blobs: Blobs = request.app.state.blobs
    return Response(status_code=200 if await asyncio.to_thread(blobs.has, digest) else 404)


@router.post("/api/blobs/{digest}", status_code=201)
async def take_blob(digest: str, request: Request) -> Response:
    """Store the request's body, whose SHA-256 must be the digest. An hour later it is removed."""
    blobs: Blobs = request.app.state.blobs
    uploads: set[object] = request.app.state.uploads
    if await asyncio.to_thread(blobs.has, digest):
        async for _ in request.stream():  # some clients read no answer before they have sent all
            pass
        return Response(status_code=200)
    if len(uploads) >= MOST_UPLOADS:
        raise BodiesTooLong(f"at most {MOST_UPLOADS} uploads are possible at a time: try again")
    size = int(request.headers.get("content-length", "0"))
    uploads.add(request)  # before the next await: others count it from now on
    try:
        upload = await asyncio.to_thread(blobs.expect, digest, size)
        try:
            await _receive(request, upload)
            await asyncio.to_thread(upload.finish)
        except ClientDisconnect:
            return Response(status_code=499)  # visible only in a log
        finally:
            await asyncio.to_thread(upload.close)
    finally:
        uploads.discard(request)
    return Response(status_code=201)


async def _receive(request: Request, upload: Upload) -> None:
    held = bytearray()
    async for part in request.stream():
        held += part
        if len(held) >= _WRITE_BYTES:
            await asyncio.to_thread(upload.write, bytes(held))
            held.clear()
    await asyncio.to_thread(upload.write, bytes(held))
