"""Test that rows of the project that refer to an account by its identifier are named before anything is changed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import Client
from django.urls import reverse

from ratelimits.checks.installation import check_references
from ratelimits.models import Account, Customer, Move
from ratelimits.models.customers import waiting_text
from ratelimits.usage.customers.move import move
from ratelimits.usage.customers.planning import NotMovedError, plan
from ratelimits.usage.erasure.erase import erase, preview
from ratelimits.usage.ledger.retention.erase import NotErasedError
from tests.support.customers import present
from tests.support.project_keys import contracts
from tests.support.reports.invoices import account

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def contract() -> Iterator[Any]:
    with contracts() as (model, _grouped):
        yield model


@pytest.fixture
def grouped() -> Iterator[Any]:
    with contracts() as (_contract, model):
        yield model


def customer(text: str) -> Customer:
    return present("default", [text])[text]


def refused(name: str, text: str) -> str:
    return re.escape(
        f"{name} of a row of your project refers to the account {text} by its identifier, which would change"
    )


def test_a_move_is_refused_and_changes_nothing(contract: Any, admin_client: Client) -> None:
    acme = account()
    row = contract.objects.create(account=acme, payer=acme)
    sentence = refused("project.Contract.account", "acme")
    with pytest.raises(NotMovedError, match=sentence):
        plan("default", "acme")
    with pytest.raises(NotMovedError, match=sentence):
        move("acme")
    for write in ((), ("--write",)):
        with pytest.raises(CommandError, match=f"Nothing was moved: {sentence}"):
            call_command("ratelimits_move", "acme", "--to", "new", *write)
    typed = {"text": "acme", "to": "new", "when": "next", "reason": "sold"}
    for confirmed in ({}, {"_confirmed": "1"}):
        page = admin_client.post(reverse("admin:ratelimits_account_move"), typed | confirmed)
        (said,) = page.context["form"].non_field_errors()
        assert re.match(sentence, said)
    assert not Move.objects.exists()
    # A further text takes nothing away from the account, and rows that refer to it by its primary key follow it.
    owner = customer("acme")
    move("acme-inc", owner)
    contract.objects.update(account=account("bolt"))
    move("acme")
    row.refresh_from_db()
    assert (row.payer.identifier, row.payer.pk) == ("acme-inc", acme.pk)


def test_a_row_that_refers_to_a_waiting_account_is_named_too(contract: Any) -> None:
    account()
    owner = customer("acme")
    move("acme")
    waiting = Account.objects.get(identifier=waiting_text(owner))
    contract.objects.create(account=waiting)
    with pytest.raises(NotMovedError, match=refused("project.Contract.account", waiting.identifier)):
        move("acme-inc", owner)
    contract.objects.all().delete()
    move("acme-inc", owner)
    waiting.refresh_from_db()
    assert waiting.identifier == "acme-inc"


def test_the_rows_of_a_many_to_many_relation_are_named_too(grouped: Any) -> None:
    group: Any = grouped._meta.get_field("group").related_model
    grouped.objects.create(group=group.objects.create(), member=account())
    with pytest.raises(NotMovedError, match=refused("project.GroupedAccount.member", "acme")):
        move("acme")


def test_an_erasure_is_refused_and_changes_nothing(contract: Any) -> None:
    acme = account()
    row = contract.objects.create(account=acme)
    sentence = refused("project.Contract.account", "acme")
    assert re.match(sentence, preview(customer("acme")).obstacle)
    with pytest.raises(NotErasedError, match=sentence):
        erase(customer("acme"))
    row.delete()
    owner = customer("acme")
    move("acme")
    successor = account()
    contract.objects.create(account=successor)
    erase(owner)
    successor.refresh_from_db()
    assert successor.identifier == "acme"
    assert Account.objects.get(pk=acme.pk).identifier == waiting_text(owner)


def test_a_check_warns_of_such_keys_alone(contract: Any) -> None:
    warnings = {str(warning.msg).partition(" ")[0]: warning.id for warning in check_references(None)}
    assert warnings == dict.fromkeys(("project.Contract.account", "project.GroupedAccount.member"), "ratelimits.W058")


def test_no_check_warns_of_the_app_s_own_keys() -> None:
    assert check_references(None) == []
