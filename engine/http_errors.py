"""What every route shares: bodies in, JSON out, refusals in OpenAI's envelope, request ids.

Owns: the mapping from exceptions to answers, the X-Request-Id rules. Refuses to know: the routes. Invariants:
no exception reaches the client as anything but an envelope, not even one of HTTP's parser; an unforeseen one
is logged with its traceback and answered with 500; a client that is gone gets no answer at all.

Usage: `web.Application(middlewares=[envelope_errors])`.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import hdrs, http_exceptions, web

from firstdiff.engine.openai_fields import ApiError, describe

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

REQUEST_ID_HEADER = "X-Request-Id"
RETRY_AFTER_S = 1
CLIENT_CLOSED_REQUEST = 499
CANCELLED = "cancelled"
ERROR_TYPE = web.RequestKey("firstdiff_error_type", str)
"""Why a request got no whole answer, in a word; for the trace."""
_REQUEST_ID = re.compile(r"[!-~]{1,128}")


def json_response(value: object, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """`value` as JSON; bytes are taken as encoded already."""
    body = value if isinstance(value, bytes) else msgspec.json.encode(value)
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


def error_response(error: ApiError) -> web.Response:
    """The envelope; a full queue or a server that ends also says when to come back, a 401 what it wants."""
    headers: dict[str, str] = {}
    if error.status in (429, 503):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if error.status == 401:
        headers[hdrs.WWW_AUTHENTICATE] = "Bearer"
    return json_response(error.body(), status=error.status, headers=headers)


class HttpConnection(web.RequestHandler):
    """A connection that answers what is no HTTP as every other refusal is answered, then ends."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Nothing here is a defect of ours, so the log has it only where somebody looks for it."""
        if not isinstance(exc, http_exceptions.HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        logging.getLogger(__name__).debug("what %s sent is no HTTP", request.remote, exc_info=exc)
        error = ApiError(f"expected HTTP, got what cannot be read: {' '.join(exc.message.split())[:200]}")
        response = error_response(error)
        response.force_close()
        return response


@web.middleware
async def envelope_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer what a handler raised."""
    try:
        return await handler(request)
    except ApiError as error:
        request[ERROR_TYPE] = error.code or str(error.status)
        return error_response(error)
    except web.HTTPException as error:
        request[ERROR_TYPE] = str(error.status)
        response = error_response(_from_http(request, error))
        if hdrs.ALLOW in error.headers:
            response.headers[hdrs.ALLOW] = error.headers[hdrs.ALLOW]
        return response
    except ConnectionError:
        # The client is gone and nothing is wrong here; the answer goes nowhere, but spares the log an error.
        request[ERROR_TYPE] = CANCELLED
        return web.Response(status=CLIENT_CLOSED_REQUEST)
    except Exception:
        request[ERROR_TYPE] = "internal_error"
        logging.getLogger(__name__).exception("unforeseen error in %s %s", request.method, request.path)
        return error_response(
            ApiError(
                "expected to answer, got an internal error: see the server's log",
                status=500,
                code="internal_error",
            )
        )


async def read_body(request: web.Request, *, limit: int, timeout_s: float) -> bytes:
    """The whole body; ApiError when it is too large, too slow or wrongly encoded."""
    try:
        async with asyncio.timeout(timeout_s):
            return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise ApiError(
            f"expected a body of at most {limit} bytes, got more: send less",
            status=413,
            code="body_too_large",
        ) from error
    except TimeoutError as error:
        raise ApiError(
            f"expected the whole body within {timeout_s:g} s, got a part of it: send it faster",
            status=408,
            code="body_timeout",
        ) from error
    except (http_exceptions.HttpProcessingError, web.RequestPayloadError) as error:
        raise ApiError(f"expected a readable body, got: {str(error)[:200]}: check its encoding") from error


def read_request_id(request: web.Request) -> str | None:
    """The client's X-Request-Id, None when it sent none; ApiError when it is not usable."""
    value = request.headers.get(REQUEST_ID_HEADER)
    if value is None:
        return None
    if _REQUEST_ID.fullmatch(value) is None:
        raise ApiError(
            "expected X-Request-Id as 1 to 128 printable ASCII characters without spaces, "
            f"got {describe(value)}",
            param=REQUEST_ID_HEADER,
        )
    return value


async def echo_request_id(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Signal handler: every answer carries the id that its request came with."""
    value = request.headers.get(REQUEST_ID_HEADER)
    if value is not None and _REQUEST_ID.fullmatch(value) and REQUEST_ID_HEADER not in response.headers:
        response.headers[REQUEST_ID_HEADER] = value


async def refuse_expectation(request: web.Request) -> web.StreamResponse | None:
    """`Expect: 100-continue` is met, any other expectation refused with an envelope."""
    value = request.headers.get(hdrs.EXPECT, "")
    if value.lower() != "100-continue":
        return error_response(
            ApiError(f"expected no Expect header but 100-continue, got {describe(value)}", status=417)
        )
    assert request.transport is not None
    request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    return None


def _from_http(request: web.Request, error: web.HTTPException) -> ApiError:
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return ApiError(
            f"expected {allowed} for {describe(request.path)}, got {describe(request.method)}",
            status=405,
            code="method_not_allowed",
        )
    if error.status == 404:
        return ApiError(
            f"expected a path of this server, got {describe(request.path)}: see /v1/models for a start",
            status=404,
            code="not_found",
        )
    return ApiError(f"expected an answerable request, got: {error.reason}", status=error.status)
