"""`distensor hub pay`: a whole hub and a payment service on a socket; what is lost on the way is paid once."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_kit import until
from test_hub_money import DAY, Place, operator, place, refused, wanted

from distensor.core.clock import SYSTEM_CLOCK
from distensor.core.errors import ConfigError, StoreError
from distensor.core.statement import NodeMoney
from distensor.hub import pay_cli
from distensor.hub.payouts.stripe import API_BASE
from distensor.testing.fake_stripe import FakeStripe, Mishap


@pytest.fixture
def stripe() -> Iterator[FakeStripe]:
    with FakeStripe(clock=SYSTEM_CLOCK, enabled={"acct_1"}) as fake:
        yield fake


def payout_file(folder: Path, base: str, node_id: str, *, key: str = "sk_test_fake") -> Path:
    secret = folder / "stripe.key"
    secret.write_text(key)
    secret.chmod(0o600)
    file = folder / "payouts.toml"
    file.write_text(
        f'currency = "eur"\nmicro_per_minor = 300\nleast_minor = 1\nkey_file = "stripe.key"\nbase = "{base}"\n'
        f'[accounts]\n{node_id} = "acct_1"\nn_other = "acct_2"\n'
    )
    return file


async def earn(here: Place, submission: str, at: int) -> None:
    """8,000 micro-credits that are payable."""
    job_id, epoch = await here.call(here.client.submit_job, wanted(submission))
    await until(lambda: sum(ref[0] == job_id for ref in here.node.held) == 2)
    await here.work(job_id, epoch, 0, 4)
    here.clock.write_text(str(at + 2 * DAY + 7200))
    here.hub.kill()
    here.hub = await asyncio.to_thread(here.hub.restart)
    await until(lambda: here.node.connected)


@pytest.mark.asyncio
async def test_what_is_payable_is_paid_once_and_the_rest_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stripe: FakeStripe
) -> None:
    state = tmp_path / "hub"
    async with place(tmp_path) as here:
        await earn(here, "s1", 0)
        by_hand = operator(state, capsys, "payout", "make", here.node_id, "0.000500")["payouts"]
        file = str(payout_file(tmp_path, stripe.base, here.node_id))
        stripe.mishaps.extend([Mishap.NONE, Mishap.LOST_ANSWER])
        (paid,) = operator(state, capsys, "pay", file)["payouts"]
        assert (paid["node_id"], paid["micro"], paid["state"], paid["why"]) == (here.node_id, 7500, "paid", "")
        (made,) = stripe.transfers
        assert (made["amount"], made["transfer_group"]) == (25, paid["payout_id"])
        assert operator(state, capsys, "pay", file)["payouts"] == []
        assert await here.money() == NodeMoney(credited=8000, clearing=500, paid=7500)
        (line,) = [one for one in operator(state, capsys, "audit")["entries"] if one["action"] == "payout paid"]
        assert line["target"] == paid["payout_id"]
        operator(state, capsys, "payout", "fail", by_hand[0]["payout_id"])

        stripe.enabled.clear()
        (refused_,) = operator(state, capsys, "pay", file)["payouts"]
        assert (refused_["micro"], refused_["state"]) == (300, "sent")
        assert "insufficient_capabilities_for_transfer" in refused_["why"]
        stripe.enabled.add("acct_1")
        await _again_and_again(state, file)
        assert (await here.money()) == NodeMoney(credited=8000, payable=200, paid=7800)
        assert [one["amount"] for one in stripe.transfers] == [25, 1]


async def _again_and_again(state: Path, file: str) -> None:
    """As a service, until it is told to stop; no second one beside it."""
    command = [sys.executable, "-m", "distensor", "hub", "pay", file, "--state", str(state), "--json"]
    service = await asyncio.create_subprocess_exec(*command, "--every", "60", stdout=subprocess.PIPE)
    assert service.stdout is not None
    try:
        said = json.loads(await asyncio.wait_for(service.stdout.readline(), 60))
        assert [one["state"] for one in said["payouts"]] == ["paid"]
        with pytest.raises(StoreError, match="another `distensor hub pay` runs on it"), pay_cli.alone(state):
            pass
    finally:
        service.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(service.wait(), 60) == 0


@pytest.mark.asyncio
async def test_a_wrong_key_is_shown_nowhere_and_fails_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stripe: FakeStripe
) -> None:
    state = tmp_path / "hub"
    async with place(tmp_path) as here:
        await earn(here, "s1", 0)
        file = payout_file(tmp_path, stripe.base, here.node_id, key="sk_live_secret")
        (one,) = operator(state, capsys, "pay", str(file))["payouts"]
        assert (one["state"], one["why"]) == (
            "sent",
            "Stripe: the list of transfers: status 401 (invalid_request_error)",
        )
        (file.parent / "stripe.key").write_text("sk live secret")
        assert "does not hold a key" in refused(state, capsys, "pay", str(file))
        assert not [one for one in (tmp_path / "hub").iterdir() if one.suffix == ".log" and "sk_" in one.read_text()]
        assert "sk_live" not in here.hub.log()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"\[accounts\] has no line"),
        ("currency = 1", "'currency' is int; expected currency"),
        ("key = 'sk_live_x'", "'key' is str; expected currency"),
        ("[accounts]\nn_1 = 'iban'", r"\[accounts\] has no line"),
        ("[accounts]\nn_1 = 'acct_1'", "currency is missing"),
        ("currency = 'EUR'\nmicro_per_minor = 1\n[accounts]\nn_1 = 'acct_1'", "three small letters"),
        ("=", "payout file"),
    ],
)
def test_a_file_that_is_wrong_says_where(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "payouts.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        pay_cli.read_settings(file)
    assert "sk_live" not in str(caught.value)


def test_a_file_has_good_values_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        pay_cli.read_settings(tmp_path / "none.toml")
    (tmp_path / "p.toml").write_text("currency = 'usd'\nmicro_per_minor = 10000\n[accounts]\nn_1 = 'acct_1'")
    found = pay_cli.read_settings(tmp_path / "p.toml")
    assert (found.base, found.key_file, found.rate.least_minor) == (API_BASE, None, 100)
    assert found.accounts == {"n_1": "acct_1"}
