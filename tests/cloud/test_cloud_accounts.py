"""Accounts and keys over HTTP: made, listed, changed, rotated, revoked."""

from __future__ import annotations

from cloud_kit import CloudHub

from distensor.comm.keys import KeyKind
from distensor.comm.tokens import decode_token
from distensor.hub.authorization import Scope


def test_an_account_is_made_shown_and_changed(hub: CloudHub) -> None:
    admin = hub.client()
    made = admin.post("/v1/accounts", {"account": "ann", "kinds": ["provider"]})
    assert made.status == 201, made
    assert made.headers["location"] == "/v1/accounts/ann"
    shown = admin.get("/v1/accounts/ann")
    assert shown.json == made.json
    assert shown.json["limits"] == {"workers": None, "waiting": None, "priority": 0}
    change = {"limits": {"workers": 4}, "disabled": True}
    changed = admin.ask("PATCH", "/v1/accounts/ann", change, {"If-Match": shown.headers["etag"]})
    assert (changed.status, changed.json["disabled"], changed.json["limits"]["workers"]) == (200, True, 4)
    late = admin.ask("PATCH", "/v1/accounts/ann", {"disabled": False}, {"If-Match": shown.headers["etag"]})
    assert late.status == 412
    assert admin.get("/v1/accounts/ann").json["disabled"]
    assert admin.get("/v1/accounts/ann", If_None_Match=changed.headers["etag"]).status == 304
    again = admin.post("/v1/accounts", {"account": "ann", "kinds": ["trainer"]})
    assert (again.status, again.json["detail"]) == (409, "there is an account 'ann' already")


def test_lists_come_in_pages_and_filtered(hub: CloudHub) -> None:
    admin = hub.client()
    for number in range(5):
        admin.post("/v1/accounts", {"account": f"page-{number}", "kinds": ["provider"]})
    names, after = [], ""
    while True:
        page = admin.get(f"/v1/accounts?limit=2{after}").json
        names += [one["account"] for one in page["items"]]
        assert len(page["items"]) <= 2
        if page["next"] is None:
            break
        after = f"&after={page['next']}"
    assert names == sorted(set(names))
    assert {f"page-{number}" for number in range(5)} <= set(names)
    trainers = admin.get("/v1/accounts?kind=trainer&limit=200").json["items"]
    assert trainers
    assert all("trainer" in one["kinds"] for one in trainers)
    assert admin.get("/v1/accounts?after=nobody").status == 409


def test_a_key_is_shown_once_and_opens_the_api_and_the_hub(hub: CloudHub) -> None:
    admin = hub.client()
    made = admin.post("/v1/keys", {"account": "other", "kind": "trainer", "label": "lab", "days": 9}).json
    assert decode_token(made["token"]).secret == made["secret"]
    key = made["key"]["key"]
    assert made["secret"] not in admin.get(f"/v1/keys/{key}").body.decode()
    own = hub.stranger()
    own.key = made["secret"]
    me = own.get("/v1/me").json
    assert (me["kind"], me["account"], me["key"]) == ("trainer key", "other", key)
    own.key = made["token"]
    assert own.get("/v1/me").json == me


def test_a_key_is_rotated_and_revoked(hub: CloudHub) -> None:
    admin = hub.client()
    first = admin.post("/v1/keys", {"account": "me", "kind": "trainer"}).json
    path = f"/v1/keys/{first['key']['key']}"
    second = admin.post(f"{path}/rotate", {"hours": 1})
    assert second.status == 201
    assert admin.get(path).json["state"] == "replaced"
    assert admin.post(f"{path}/rotate").status == 409
    fresh = hub.stranger()
    fresh.key = second.json["secret"]
    assert fresh.get("/v1/me").status == 200
    revoked = admin.post(f"/v1/keys/{second.json['key']['key']}/revoke")
    assert (revoked.status, revoked.json["state"]) == (200, "revoked")
    hub.do(hub.inside.door.refresh())
    assert fresh.get("/v1/me").status == 401


def test_a_trainer_sees_and_revokes_the_keys_of_its_own_account_only(hub: CloudHub) -> None:
    foreign = hub.client("other", KeyKind.TRAINER).get("/v1/me").json["key"]
    mine = hub.client("me", KeyKind.TRAINER)
    listed = mine.get("/v1/keys?limit=200").json["items"]
    assert {one["account"] for one in listed} == {"me"}
    assert mine.get("/v1/keys?account=other").json == {"items": [], "next": None}
    assert mine.get("/v1/keys?account=nobody").json == {"items": [], "next": None}
    assert mine.post(f"/v1/keys/{foreign}/revoke").status == 404
    assert mine.post(f"/v1/keys/{mine.get('/v1/me').json['key']}/revoke").json["state"] == "revoked"


def test_an_admin_key_makes_no_key_that_may_more_than_itself(hub: CloudHub) -> None:
    few = hub.client("me", KeyKind.ADMIN, Scope.KEYS_WRITE, Scope.JOBS_READ)
    whole = hub.client("me", KeyKind.ADMIN).get("/v1/me").json["key"]
    asked = {"account": "me", "kind": "admin"}
    refused = few.post("/v1/keys", asked)
    assert refused.status == 403
    assert "accounts:read" in refused.json["detail"]
    assert few.post("/v1/keys", {**asked, "scopes": ["jobs:end"]}).status == 403
    assert few.post("/v1/keys", {**asked, "scopes": ["jobs:read"]}).status == 201
    assert few.post(f"/v1/keys/{whole}/rotate").status == 403


def test_the_same_idempotency_key_is_the_same_answer(hub: CloudHub) -> None:
    admin = hub.client()
    asked = {"account": "me", "kind": "provider", "label": "once"}
    first = admin.post("/v1/keys", asked, Idempotency_Key="k-1")
    again = admin.post("/v1/keys", asked, Idempotency_Key="k-1")
    assert (first.status, first.body) == (again.status, again.body)
    other = admin.post("/v1/keys", {**asked, "label": "twice"}, Idempotency_Key="k-1")
    assert other.status == 409
    made = [one for one in admin.get("/v1/keys?account=me&limit=200").json["items"] if one["label"] == "once"]
    assert len(made) == 1
    second = hub.client().post("/v1/keys", asked, Idempotency_Key="k-1")
    assert second.json["key"]["key"] != first.json["key"]["key"]


def test_a_request_that_failed_may_be_sent_again_with_its_key(hub: CloudHub) -> None:
    admin = hub.client()
    asked = {"account": "later", "kind": "trainer"}
    assert admin.post("/v1/keys", asked, Idempotency_Key="k-2").status == 404
    admin.post("/v1/accounts", {"account": "later", "kinds": ["trainer"]})
    assert admin.post("/v1/keys", asked, Idempotency_Key="k-2").status == 201


def test_the_audit_log_is_read_in_pages(hub: CloudHub) -> None:
    admin = hub.client()
    admin.post("/v1/accounts", {"account": "audited", "kinds": ["admin"]})
    lines = admin.get("/v1/audit?limit=3").json
    assert (lines["items"][0]["action"], lines["items"][0]["target"]) == ("account add", "audited")
    assert lines["items"][0]["actor"].startswith("admin key me k_")
    behind = admin.get(f"/v1/audit?limit=3&after={lines['next']}").json
    numbers = [one["number"] for page in (lines, behind) for one in page["items"]]
    assert numbers == sorted(numbers, reverse=True)
