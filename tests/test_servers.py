from __future__ import annotations

import threading

import pytest
import redis
from django.contrib.auth.models import Group
from django.core.cache import caches
from django.db import connection


def test_the_session_decides_on_a_real_server(redis_client: redis.Redis) -> None:
    caches["ratelimits"].set("probe", 1)
    assert redis_client.dbsize() == 1


@pytest.mark.django_db(transaction=True)
def test_another_thread_sees_the_rows_of_a_test() -> None:
    Group.objects.create(name="seen")
    names: list[str] = []

    def read() -> None:
        names.extend(Group.objects.values_list("name", flat=True))
        connection.close()

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert names == ["seen"]
