"""Is it well, and what is it doing: ``/health``, task dumps, the check of an idle engine."""

from __future__ import annotations

from http_stub import StubEngine, client_of

ADMIN = {"Authorization": "Bearer admin"}


async def test_the_dump_of_tasks_is_for_admins() -> None:
    client = client_of(StubEngine(), api_key=("key",), admin_api_key=("admin",))
    response = await client.get("/debug/tasks", headers=ADMIN)
    text = await response.get_data(as_text=True)
    assert response.content_type == "text/plain; charset=utf-8"
    assert " trio tasks:\n" in text
    assert " in AdminEndpoints.tasks\n" in text
    for headers in ({}, {"Authorization": "Bearer key"}):
        assert (await client.get("/debug/tasks", headers=headers)).status_code == 401
    assert (await client_of(StubEngine()).get("/debug/tasks")).status_code == 403
