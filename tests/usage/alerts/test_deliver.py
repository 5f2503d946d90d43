from __future__ import annotations

import contextlib
import hmac
import http.client
import json
import re
import socket
import ssl
import threading
from base64 import b64decode, b64encode
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core import mail
from django.db.models import F
from django.test import override_settings

from ratelimits import moments
from ratelimits.conf.setting_rules import LONGEST_POST
from ratelimits.models import Account
from ratelimits.models.accounts.named import named_now
from ratelimits.models.keys import canonical_account
from ratelimits.signals import threshold_reached
from ratelimits.usage.alerts import deliver
from ratelimits.usage.alerts.deliver import WEBHOOK_TYPE, post_webhook, signature
from ratelimits.usage.alerts.evaluate import _write
from ratelimits.usage.models import Alert, AlertChannel, AlertDelivery
from ratelimits.usage.models.alerts import new_secret
from tests.support.plain import PLAIN
from tests.support.usage.traffic import at
from tests.usage.alerts.conftest import Received, Receiver

pytestmark = pytest.mark.django_db(transaction=True)


def raise_alert(*, threshold: int = 80, account: str = "acme", **channel: Any) -> Alert:
    """Raise an alert with its deliveries, for one channel."""
    owner, _created = Account.objects.get_or_create(
        identifier=canonical_account(account), defaults={"name": "Acme & Sons", "timezone": "Europe/Paris"}
    )
    account = owner.identifier
    if channel:
        AlertChannel.objects.create(account=owner, **channel)
    period = at("2026-11-01T00:00+01:00") // 1_000_000
    customer = named_now("default", [account])[account]
    assert customer.pk is not None
    alert = Alert(
        id=Alert.id_of(customer.token, period, "requests", 7, threshold, 10_000),
        customer_id=customer.pk,
        account=account,
        meter="requests",
        rule=7,
        rule_name="monthly",
        period=period,
        period_end=at("2026-12-01T00:00+01:00") // 1_000_000,
        threshold=threshold,
        basis="included",
        used=8123,
        quantity=10_000,
    )
    assert _write("default", alert, customer)
    return alert


def deliver_all(later: timedelta = timedelta()) -> list[bool]:
    """Make every delivery that is due this much later than now; return whether each succeeded."""
    now = moments.now() + later
    return [deliver.deliver(name, now) for name in deliver.due(now)]


def only(kind: str) -> AlertDelivery:
    return AlertDelivery.objects.get(kind=kind)


def is_signed(received: Received, secret: str) -> bool:
    """Return whether the signature is right, computed here as Standard Webhooks describes it."""
    head = received.headers
    signed = f"{head['webhook-id']}.{head['webhook-timestamp']}.".encode() + received.body
    digest = hmac.new(b64decode(secret.removeprefix("whsec_")), signed, "sha256").digest()
    return head["webhook-signature"] == f"v1,{b64encode(digest).decode()}"


def test_the_signal_is_sent_with_the_alert(signalled: list[Alert]) -> None:
    alert = raise_alert()
    assert deliver_all() == [True]
    assert deliver_all(timedelta(days=1)) == []
    assert signalled == [alert]


def test_a_receiver_that_raises_gets_the_signal_again(signalled: list[Alert]) -> None:
    def broken(**kwargs: object) -> None:
        raise RuntimeError("no")

    raise_alert()
    threshold_reached.connect(broken)
    assert deliver_all() == [False]
    threshold_reached.disconnect(broken)
    assert deliver_all() == []
    assert deliver_all(timedelta(seconds=34)) == [True]
    assert len(signalled) == 2


def test_the_e_mail_says_who_used_how_much_of_what_and_when() -> None:
    raise_alert(email="ops@example.com")
    assert deliver_all() == [True, True]
    (message,) = mail.outbox
    assert message.to == ["ops@example.com"]
    assert message.subject == "Acme & Sons: 80 % of requests used"
    assert "Acme & Sons has used 8123 of 10000 requests" in message.body
    assert "2026-11-01 00:00 CET to 2026-12-01 00:00 CET" in message.body
    assert "The plan includes this quantity" in message.body
    assert message.message()["Message-ID"] == f"<{only('email').pk}@localhost>"


def mail_server(port: int) -> override_settings:
    """Return the settings of a mail server at this port, in the form of this version of Django."""
    backend = "django.core.mail.backends.smtp.EmailBackend"
    if hasattr(mail, "mailers"):
        options = {"host": "127.0.0.1", "port": port}
        return override_settings(MAILERS={"default": {"BACKEND": backend, "OPTIONS": options}})
    return override_settings(EMAIL_BACKEND=backend, EMAIL_HOST="127.0.0.1", EMAIL_PORT=port)


def test_a_mail_server_that_is_away_is_asked_again() -> None:
    raise_alert(email="ops@example.com")
    with mail_server(1):
        assert sorted(deliver_all()) == [False, True]
    assert "ConnectionRefusedError" in only("email").error


@override_settings(RATELIMITS={**PLAIN, "ALERT_TIMEOUT": 0.5})
def test_a_mail_server_that_says_nothing_is_left_alone_after_a_while() -> None:
    raise_alert(email="ops@example.com")

    def say_nothing(server: socket.socket) -> None:
        peer, _address = server.accept()
        with peer:
            peer.settimeout(20)  # a client that waited for ever would be disconnected, with another error
            with contextlib.suppress(OSError):
                peer.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as server, mail_server(server.getsockname()[1]):
        thread = threading.Thread(target=say_nothing, args=[server])
        thread.start()
        assert sorted(deliver_all()) == [False, True]
        thread.join()
    assert only("email").error.endswith("timed out")
    assert deliver.CLAIM.total_seconds() > 12 * deliver.MAX_REPLY


def test_a_webhook_is_signed_and_says_the_same_as_the_alert(receiver: Receiver) -> None:
    secret = new_secret()
    alert = raise_alert(webhook_url=receiver.url, secret=secret)
    assert deliver_all() == [True, True]
    (received,) = receiver.received
    assert received.path == "/alerts?from=test"
    assert received.headers["content-type"] == "application/json"
    assert received.headers["webhook-id"] == received.headers["idempotency-key"] == str(only("webhook").pk)
    assert abs(int(received.headers["webhook-timestamp"]) - moments.now().timestamp()) < 60
    assert is_signed(received, secret)
    assert received.json["type"] == WEBHOOK_TYPE
    assert received.json["data"] == {
        "alert_id": str(alert.pk),
        "account": "acme",
        "meter": "requests",
        "rule": "monthly",
        "key": "",
        "threshold": 80,
        "basis": "included",
        "used": 8123,
        "quantity": 10_000,
        "billing_period_start": "2026-10-31T23:00:00Z",
        "billing_period_end": "2026-11-30T23:00:00Z",
    }


def test_the_signature_is_that_of_the_published_example() -> None:
    """https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md"""
    secret, name = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "msg_p5jXN8AQM9LWM0D4loKWxJek"
    found = signature(secret, name, 1614265330, b'{"test": 2432232314}')
    assert found == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_the_documented_receiver_takes_a_webhook_and_no_other(receiver: Receiver) -> None:
    page = (Path(__file__).parents[3] / "docs" / "alerts.md").read_text()
    (code,) = re.findall(r"```python\n(import base64.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    raise_alert(webhook_url=receiver.url)
    deliver_all()
    (received,) = receiver.received
    secret = AlertChannel.objects.get().secret
    assert names["verified"](secret, received.headers, received.body)
    assert not names["verified"](secret, received.headers, received.body.replace(b"80", b"10"))
    assert not names["verified"](new_secret(), received.headers, received.body)


def test_a_webhook_that_fails_comes_again_later_with_the_same_id_and_body(receiver: Receiver) -> None:
    receiver.answers = [500, 302, 429]
    raise_alert(webhook_url=receiver.url)
    assert sorted(deliver_all()) == [False, True]
    assert only("webhook").error == "Refused: it answered 500 Internal Server Error"
    assert deliver_all(timedelta(seconds=29)) == []
    assert deliver_all(timedelta(seconds=34)) == [False]
    assert deliver_all(timedelta(seconds=34 + 59)) == []
    assert deliver_all(timedelta(seconds=34 + 67)) == [False]
    assert deliver_all(timedelta(hours=1)) == [True]
    assert deliver_all(timedelta(days=9)) == []
    assert len(receiver.received) == 4
    assert len({(received.headers["webhook-id"], received.body) for received in receiver.received}) == 1
    assert len({received.headers["webhook-signature"] for received in receiver.received}) == 4
    assert only("webhook").attempts == 4


def test_a_receiver_that_does_not_answer_is_asked_again(receiver: Receiver) -> None:
    raise_alert(webhook_url="http://127.0.0.1:1/")
    assert sorted(deliver_all()) == [False, True]
    assert "ConnectionRefusedError" in only("webhook").error


def test_a_webhook_leads_only_to_public_addresses(receiver: Receiver, settings: Any) -> None:
    settings.RATELIMITS = {name: value for name, value in settings.RATELIMITS.items() if name != "ALERT_PUBLIC_ONLY"}
    raise_alert(webhook_url=receiver.url.replace("127.0.0.1", "localhost"))
    assert sorted(deliver_all()) == [False, True]
    assert only("webhook").error.startswith("NotPublicError: the host has no public address")
    assert receiver.received == []


def test_a_line_break_in_an_account_forges_no_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    raise_alert(account="acme\nERROR:root:all is lost", webhook_url="http://127.0.0.1:1/")
    deliver_all()
    assert any("attempt 1" in message for message in caplog.messages)
    assert [message for message in caplog.messages if "\n" in message] == []


def test_an_answer_that_comes_byte_by_byte_has_one_deadline() -> None:
    answer = b"HTTP/1.1 204 No Content\r\nX-Slow: " + b"x" * 60 + b"\r\n\r\n"
    hung_up = threading.Event()

    def drip(server: socket.socket) -> None:
        peer, _address = server.accept()
        with peer, contextlib.suppress(OSError):
            for number in range(len(answer)):
                peer.sendall(answer[number : number + 1])
                if hung_up.wait(0.05):
                    break

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=drip, args=[server])
        thread.start()
        with pytest.raises(TimeoutError):
            post_webhook(f"http://127.0.0.1:{server.getsockname()[1]}/", b"{}", {}, timeout=1)
        hung_up.set()
        thread.join()


def test_a_webhook_goes_over_tls_to_who_has_the_certificate(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = str(Path(__file__).with_name("localhost.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    receiver.server.socket = context.wrap_socket(receiver.server.socket, server_side=True)
    url = receiver.url.replace("http://", "https://")
    with pytest.raises(ssl.SSLCertVerificationError):
        post_webhook(url, b"{}", {}, timeout=30)
    monkeypatch.setenv("SSL_CERT_FILE", certificate)
    post_webhook(url, b"{}", {"X-Told": "yes"}, timeout=30)
    (received,) = receiver.received
    assert (received.body, received.headers["x-told"]) == (b"{}", "yes")
    assert received.headers["host"] == url.split("/")[2]


def test_a_claim_outlasts_the_longest_attempt() -> None:
    assert deliver.CLAIM.total_seconds() > deliver.MAX_ATTEMPT > LONGEST_POST


def test_a_webhook_that_ends_in_the_middle_of_its_answer_is_a_failure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def cut() -> None:
            peer, _address = server.accept()
            with peer:
                peer.sendall(b"HTTP/1.1 2")

        thread = threading.Thread(target=cut)
        thread.start()
        with pytest.raises((OSError, http.client.HTTPException)):
            post_webhook(f"http://127.0.0.1:{server.getsockname()[1]}/", b"{}", {}, timeout=10)
        thread.join()


def test_a_delivery_is_given_up_in_the_end_and_can_be_made_due_again(receiver: Receiver) -> None:
    receiver.answers = [503] * deliver.MAX_ATTEMPTS
    raise_alert(webhook_url=receiver.url)
    for number in range(deliver.MAX_ATTEMPTS):
        deliver_all(timedelta(days=number))
    assert only("webhook").state == "failed"
    assert deliver_all(timedelta(days=99)) == []
    assert len(receiver.received) == deliver.MAX_ATTEMPTS
    AlertDelivery.objects.filter(state="failed").update(state="waiting", attempts=0)
    assert deliver_all(timedelta(days=99)) == [True]


def test_pauses_double_up_to_a_longest() -> None:
    seconds = [deliver.pause(attempts).total_seconds() for attempts in range(1, deliver.MAX_ATTEMPTS)]
    assert all(30 * 2**number <= pause <= 33 * 2**number for number, pause in enumerate(seconds[:9]))
    assert all(6 * 3600 <= pause <= 6.6 * 3600 for pause in seconds[10:])


def test_a_receiver_that_is_gone_for_good_is_left_alone(receiver: Receiver) -> None:
    receiver.answers = [410]
    raise_alert(webhook_url=receiver.url)
    deliver_all()
    assert only("webhook").state == "failed"


@pytest.mark.parametrize("change", ["deleted", "switched off", "emptied"])
def test_a_channel_that_is_no_more_gets_nothing(change: str, receiver: Receiver) -> None:
    raise_alert(webhook_url=receiver.url)
    if change == "deleted":
        AlertChannel.objects.all().delete()
    elif change == "switched off":
        AlertChannel.objects.update(active=False)
    else:
        AlertChannel.objects.update(email="ops@example.com", webhook_url="")
    deliver_all()
    assert only("webhook").state == "failed"
    assert not receiver.received


def test_a_claimed_delivery_is_nobody_else_s_until_the_claim_runs_out(receiver: Receiver) -> None:
    raise_alert(webhook_url=receiver.url)
    now = moments.now()
    AlertDelivery.objects.update(attempts=F("attempts") + 1, due_at=now + deliver.CLAIM)
    assert [deliver.deliver(delivery.pk, now) for delivery in AlertDelivery.objects.all()] == [False, False]
    assert not receiver.received
    assert deliver_all(deliver.CLAIM + timedelta(seconds=1)) == [True, True]


def test_an_attempt_that_fails_late_leaves_a_newer_one_alone() -> None:
    raise_alert()
    begun = moments.now() + deliver.CLAIM

    def receive(**kwargs: object) -> None:
        AlertDelivery.objects.update(attempts=F("attempts") + 1, due_at=begun)
        raise OSError("too late")

    threshold_reached.connect(receive)
    try:
        assert deliver_all() == [False]
    finally:
        threshold_reached.disconnect(receive)
    assert (only("signal").due_at, only("signal").error) == (begun, "")


def test_what_is_sent_to_two_channels_has_two_ids(receiver: Receiver) -> None:
    owner = Account.objects.create(identifier="acme", name="Acme & Sons", timezone="Europe/Paris")
    AlertChannel.objects.create(account=owner, webhook_url=receiver.url)
    raise_alert(webhook_url=receiver.url)
    assert deliver_all() == [True, True, True]
    first, second = receiver.received
    assert first.headers["webhook-id"] != second.headers["webhook-id"]
    assert json.loads(first.body) == json.loads(second.body)
