"""Access to the server: API keys and their limits, and web pages of other sites."""

from __future__ import annotations

import json
import math
from typing import Any

import attrs
import pytest
import trio

from tests.support.http_stub import (
    StubEngine,
    captured_logs,
    client_of,
    connect,
    http_client,
    raw_request,
    read_until,
    served,
    server_config,
)
from trioserve.http.api import app as app_module
from trioserve.http.api.auth import Caller, Keys
from trioserve.http.api.errors import Forbidden, KeyLimit, Unauthorized
from trioserve.http.api.routes import ROUTES
from trioserve.protocol.errors import InvalidRequest

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "x"}]}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def error_of(response: Any) -> Any:
    return json.loads(await response.get_data(True))["error"]


async def test_every_path_but_health_needs_a_key() -> None:
    client = client_of(StubEngine(), api_key=("one", "two"), admin_api_key=("three",))
    for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing"):
        response = await client.get(path)
        assert response.status_code == 401
        assert response.headers["WWW-Authenticate"] == "Bearer"
        error = await error_of(response)
        assert error["type"] == "authentication_error"
        assert error["code"] == "invalid_api_key"
    assert (await client.get("/health")).status_code == 200
    for key in ("one", "two", "three"):
        assert (await client.get("/v1/models", headers=bearer(key))).status_code == 200


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer on", "Bearer onee", "Basic one", "one"]
)
def test_wrong_keys(header: str | None) -> None:
    with pytest.raises(Unauthorized):
        Keys(["one"]).caller(header)


@pytest.mark.parametrize("header", ["Bearer one", "bearer one", "Bearer  one "])
def test_right_keys(header: str) -> None:
    assert Keys(["zero", "one"]).caller(header) == Caller("key-2", admin=False)


def test_callers_are_named_by_their_keys_places() -> None:
    keys = Keys(["one", "both"], ["both", "boss"])
    names = {key: keys.caller(f"Bearer {key}") for key in ("one", "both", "boss")}
    assert names == {
        "one": Caller("key-1", admin=False),
        "both": Caller("admin-1", admin=True),
        "boss": Caller("admin-2", admin=True),
    }


def test_every_key_is_compared_whole_whatever_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((len(left), len(right)))
        return left == right

    monkeypatch.setattr("hmac.compare_digest", compare)
    keys = Keys(["short", "k" * 500], ["admin"])
    keys.caller("Bearer short")
    for wrong in ("x", "y" * 10_000):
        with pytest.raises(Unauthorized):
            keys.caller(f"Bearer {wrong}")
    assert compared == [(32, 32)] * 9


async def test_a_key_beyond_ascii() -> None:
    async with (
        served(StubEngine(), api_key=("schlüssel",)) as url,
        http_client(url) as client,
    ):
        for header, status in (("Bearer schlüssel", 200), ("Bearer schlussel", 401)):
            headers = {b"Authorization": header.encode()}
            assert (await client.get("/v1/models", headers=headers)).status_code == status


async def test_the_log_tells_the_keys_apart_without_telling_them() -> None:
    client = client_of(StubEngine(), api_key=("secret1", "secret2"), admin_api_key=("secret3",))
    with captured_logs() as logs:
        for header in (bearer("secret2"), bearer("secret3"), bearer("secret4"), {}):
            await client.get("/v1/models", headers=header)
    assert [entry.get("key") for entry in logs] == ["key-2", "admin-1", None, None]
    assert "secret" not in str(logs)


class TestControl:
    def test_nobody_may_without_an_admin_key(self) -> None:
        for keys in (Keys([]), Keys(["one"])):
            for header in (None, "Bearer one", "Bearer admin"):
                with pytest.raises(Forbidden):
                    keys.caller(header, control=True)

    @pytest.mark.parametrize("own", [[], ["one"]])
    def test_only_an_admin_key_will_do(self, own: list[str]) -> None:
        keys = Keys(own, ["admin"])
        assert keys.caller("Bearer admin", control=True) == Caller("admin-1", admin=True)
        for header in (None, "Bearer one", "Bearer x"):
            with pytest.raises(Unauthorized, match="an admin key"):
                keys.caller(header, control=True)

    async def test_a_route_that_controls_the_server(self, monkeypatch: pytest.MonkeyPatch) -> None:
        (version,) = [route for route in ROUTES if route.handler == "version"]
        table = [
            attrs.evolve(route, control=True) if route is version else route for route in ROUTES
        ]
        monkeypatch.setattr(app_module, "served_routes", lambda _: table)
        for options, header, status, code in (
            ({}, {}, 403, "forbidden"),
            ({"api_key": ("one",)}, bearer("one"), 403, "forbidden"),
            ({"api_key": ("one",), "admin_api_key": ("a",)}, bearer("one"), 401, "invalid_api_key"),
            ({"admin_api_key": ("a",)}, {}, 401, "invalid_api_key"),
            ({"admin_api_key": ("a",)}, bearer("a"), 200, None),
        ):
            response = await client_of(StubEngine(), **options).get("/version", headers=header)
            assert response.status_code == status
            if code is not None:
                assert (await error_of(response))["code"] == code


class TestKeyLimit:
    async def test_requests_past_it_are_refused_until_one_ends(self) -> None:
        stub = StubEngine(script=lambda _: [math.inf])
        options = {"api_key": ("one", "two"), "admin_api_key": ("admin",)}
        async with (
            served(stub, max_requests_per_key=2, **options) as url,
            http_client(url) as client,
        ):
            body = {**BODY, "stream": True}
            async with (
                client.stream("POST", CHAT, json=body, headers=bearer("one")),
                client.stream("POST", CHAT, json=body, headers=bearer("one")) as second,
            ):
                assert second.status_code == 200
                refused = await client.get("/v1/models", headers=bearer("one"))
                assert refused.status_code == 429
                assert refused.headers["Retry-After"] == "1"
                error = refused.json()["error"]
                assert error["code"] == "key_limit"
                assert error["message"] == (
                    "2 requests with this key are open; that is the limit (--max-requests-per-key)"
                )
                # Others aren't concerned, nor is the key's own next one, once one has ended.
                for key in ("two", "admin"):
                    response = await client.get("/v1/models", headers=bearer(key))
                    assert response.status_code == 200
            with trio.fail_after(20):
                while (await client.get("/v1/models", headers=bearer("one"))).status_code != 200:
                    await trio.sleep(0.01)

    async def test_a_body_that_is_still_coming_counts(self) -> None:
        stub = StubEngine()
        async with (
            served(stub, max_requests_per_key=1, api_key=("one",)) as url,
            http_client(url) as client,
        ):
            whole = raw_request(json.dumps(BODY).encode())
            whole = whole.replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer one\r\n\r\n")
            async with await connect(url) as raw:
                await raw.send_all(whole[:-5])
                with trio.fail_after(20):
                    while (
                        await client.get("/v1/models", headers=bearer("one"))
                    ).status_code != 429:
                        await trio.sleep(0.01)
                await raw.send_all(whole[-5:])
                assert b" 200 " in await read_until(raw, b"\r\n")
            assert (await client.get("/v1/models", headers=bearer("one"))).status_code == 200

    def test_all_ways_out_give_the_place_back(self) -> None:
        keys = Keys(["one"], max_requests=1)
        caller = keys.caller("Bearer one")
        for _ in range(3):
            with pytest.raises(ZeroDivisionError), keys.counted(caller):
                with pytest.raises(KeyLimit), keys.counted(caller):
                    pass
                raise ZeroDivisionError
        with keys.counted(caller):
            pass

    def test_it_needs_keys(self) -> None:
        with pytest.raises(InvalidRequest, match="--api-key") as caught:
            server_config(max_requests_per_key=3)
        assert caught.value.param == "max_requests_per_key"


class TestPages:
    """Requests from web pages of other sites."""

    async def test_no_header_by_default(self) -> None:
        client = client_of(StubEngine())
        headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        for response in (
            await client.get("/v1/models", headers=headers),
            await client.options(CHAT, headers=headers),
        ):
            names = {name.lower() for name in dict(response.headers)}
            assert not [name for name in names if name.startswith("access-control")]
            assert "vary" not in names
        assert response.status_code == 405

    @pytest.mark.parametrize(
        ("allowed", "shown"), [("https://a.example", "https://a.example"), ("*", "*")]
    )
    async def test_a_preflight_needs_no_key_and_says_what_is_allowed(
        self, allowed: str, shown: str
    ) -> None:
        client = client_of(StubEngine(), api_key=("one",), allowed_origins=(allowed,))
        headers = {
            "Origin": "https://a.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
        }
        response = await client.options(CHAT, headers=headers)
        assert response.status_code == 204
        assert response.headers["Access-Control-Allow-Origin"] == shown
        assert response.headers["Access-Control-Allow-Methods"] == "POST"
        asked = headers["Access-Control-Request-Headers"]
        assert response.headers["Access-Control-Allow-Headers"] == asked
        assert "Access-Control-Allow-Credentials" not in response.headers
        assert ("Vary" in response.headers) == (allowed != "*")
        # Any other site, any other method, and what is no path at all, get nothing.
        for path, method, origin, status in (
            (CHAT, "OPTIONS", "https://b.example", 401),
            (CHAT, "DELETE", "https://a.example", 401),
            ("/nothing", "OPTIONS", "https://a.example", 401),
        ):
            if origin == "https://b.example" and allowed == "*":
                continue
            other = await client.open(path, method=method, headers={**headers, "Origin": origin})
            assert other.status_code == status

    async def test_names_of_headers_are_told_back_only_if_they_are_some(self) -> None:
        client = client_of(StubEngine(), allowed_origins=("*",))
        for asked in ("a b", "a,,b", "é", "x" * 3000, ""):
            headers = {"Origin": "https://a.example", "Access-Control-Request-Headers": asked}
            response = await client.options(CHAT, headers=headers)
            assert response.status_code == 204
            assert "Access-Control-Allow-Headers" not in response.headers

    async def test_answers_errors_and_streams_can_be_read_by_an_allowed_page(self) -> None:
        stub = StubEngine()
        origins = ("https://a.example", "http://localhost:3000")
        async with (
            served(stub, api_key=("one",), allowed_origins=origins) as url,
            http_client(url) as client,
        ):
            for origin, is_allowed in (
                ("HTTPS://a.example", True),
                (origins[1], True),
                ("https://a.example.evil", False),
            ):
                headers = {"Origin": origin, **bearer("one")}
                wrong = {**headers, **bearer("no")}
                responses = [
                    await client.post(CHAT, json=BODY, headers=headers),
                    await client.post(CHAT, json={**BODY, "stream": True}, headers=headers),
                    await client.post(CHAT, json={**BODY, "n": 0}, headers=headers),
                    await client.post(CHAT, json=BODY, headers=wrong),
                    await client.get("/nothing", headers=headers),
                ]
                assert [each.status_code for each in responses] == [200, 200, 400, 401, 404]
                for response in responses:
                    assert response.headers["Vary"] == "Origin"
                    found = response.headers.get("Access-Control-Allow-Origin")
                    assert found == (origin if is_allowed else None)
                    exposed = response.headers.get("Access-Control-Expose-Headers")
                    assert exposed == ("X-Request-Id, Retry-After" if is_allowed else None)

    @pytest.mark.parametrize(
        "origin", ["a.example", "https://a.example/", "https://*.a", "", "x,y"]
    )
    def test_what_is_no_origin_is_refused_at_the_start(self, origin: str) -> None:
        with pytest.raises(InvalidRequest, match="must be an origin") as caught:
            server_config(allowed_origins=(origin,))
        assert caught.value.param == "allowed_origins"
