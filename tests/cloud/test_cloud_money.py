"""Earnings, statements, costs, deposits and payouts over HTTP: the ledger's own numbers."""

from __future__ import annotations

import csv
import io

from cloud_kit import CloudHub

from distensor.comm.keys import KeyKind
from distensor.hub.authorization import Scope


def test_a_provider_sees_where_the_credits_of_its_nodes_are(hub: CloudHub) -> None:
    provider = hub.client("me", KeyKind.PROVIDER, Scope.LEDGER_READ)
    (mine,) = provider.get("/v1/earnings").json["items"]
    assert (mine["node"], mine["credited"], mine["pending"], mine["payable"], mine["clearing"]) == (
        hub.nodes["me"],
        5000,
        0,
        3000,
        2000,
    )
    assert provider.get(f"/v1/nodes/{hub.nodes['me']}/earnings").json == mine
    assert provider.get(f"/v1/nodes/{hub.nodes['other']}/earnings").status == 404
    assert provider.get("/v1/earnings?account=other").json == {"items": [], "next": None}
    (theirs,) = hub.client().get("/v1/earnings?account=other").json["items"]
    assert (theirs["node"], theirs["credited"]) == (hub.nodes["other"], 5000)


def test_a_statement_has_the_same_sums_by_day_job_and_device_as_json_and_csv(hub: CloudHub) -> None:
    provider = hub.client("me", KeyKind.PROVIDER)
    for by, group in (("day", None), ("job", hub.jobs["me"]), ("device", "cpu")):
        path = f"/v1/statements/{hub.nodes['me']}?by={by}"
        told = provider.get(path).json
        assert (told["name"], told["by"]) == (hub.nodes["me"], by)
        units = [line for line in told["lines"] if line["kind"] == "unit" and line["account"].startswith("pending")]
        assert [line["micro"] for line in units] == [5000]
        assert group is None or units[0]["group"] == group
        rows = list(csv.DictReader(io.StringIO(provider.get(f"{path}&format=csv").body.decode())))
        assert [int(row["micro"]) for row in rows] == [line["micro"] for line in told["lines"]]
    whole = provider.get("/v1/statements/me").json["lines"]
    assert {line["account"] for line in whole} >= {f"pending:{hub.nodes['me']}", f"payable:{hub.nodes['me']}"}
    fresh = hub.client()
    fresh.post("/v1/accounts", {"account": "idle", "kinds": ["trainer"]})
    assert fresh.get("/v1/statements/idle").json["lines"] == []


def test_what_a_trainer_pays(hub: CloudHub) -> None:
    trainer, admin = hub.client("other", KeyKind.TRAINER), hub.client()
    cost = trainer.get(f"/v1/jobs/{hub.jobs['other']}/cost").json
    assert (cost["spent"], cost["work"], cost["fees"], cost["lent"]) == (5000, 5000, 0, 5000)
    assert trainer.get(f"/v1/jobs/{hub.jobs['me']}/cost").status == 404
    before = trainer.get("/v1/accounts/other/deposit").json["deposited"]
    asked = {"key": "bank-1", "micro": 7_000_000}
    made = admin.post("/v1/accounts/other/deposit", asked)
    again = admin.post("/v1/accounts/other/deposit", asked)
    assert (made.status, again.status) == (201, 201)
    assert made.json == again.json == trainer.get("/v1/accounts/other/deposit").json
    assert made.json["deposited"] == before + 7_000_000
    other = admin.post("/v1/accounts/other/deposit", {**asked, "micro": 1})
    assert other.status == 409
    assert trainer.get("/v1/accounts/me/deposit").status == 404
    assert trainer.post("/v1/accounts/other/deposit", asked).status == 403


def test_a_payout_is_made_once_and_ends_in_one_way(hub: CloudHub) -> None:
    admin, provider = hub.client(), hub.client("other", KeyKind.PROVIDER)
    asked = {"name": hub.nodes["other"], "micro": 1000, "key": "po-1"}
    made, again = admin.post("/v1/payouts", asked), admin.post("/v1/payouts", asked)
    assert made.status == again.status == 201
    assert made.json == again.json
    clearing = provider.get("/v1/payouts?state=clearing").json["items"]
    assert {one["payout"] for one in clearing} == {"po-other", "po-1"}
    assert [one["begun_at"] for one in clearing] == sorted(one["begun_at"] for one in clearing)
    paid = admin.post("/v1/payouts/po-1/confirm", {"reason": "transfer 17"})
    assert (paid.status, paid.json["state"]) == (200, "paid")
    assert admin.post("/v1/payouts/po-1/confirm").status == 200
    assert admin.post("/v1/payouts/po-1/fail").status == 409
    assert admin.post("/v1/payouts/po-other/fail").json["state"] == "failed"
    (mine,) = provider.get("/v1/earnings").json["items"]
    assert (mine["payable"], mine["clearing"], mine["paid"]) == (4000, 0, 1000)
    assert provider.get("/v1/payouts/po-me").status == 404
    too_much = admin.post("/v1/payouts", {"name": hub.nodes["other"], "micro": 10**9})
    assert too_much.status == 409
    assert admin.post("/v1/payouts", {"name": "nobody"}).status == 404


def test_the_ledger_sums_to_zero_and_says_its_terms(hub: CloudHub) -> None:
    sums = hub.client().get("/v1/ledger").json
    assert sums["total"] == sum(sums["groups"].values()) == 0
    terms = hub.client("me", KeyKind.PROVIDER).get("/v1/terms").json
    assert (terms["micro_per_micro_batch"], terms["deposits"]) == (1000, False)
