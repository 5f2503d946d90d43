"""The API of the demo: endpoints with a fixed cost, with a cost that depends on the text, and with a settled cost."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from django.http import StreamingHttpResponse
from django.utils import timezone
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from ratelimits.quota.receipts import settle

WORD = re.compile(r"\w+")


class TimeQuery(serializers.Serializer[dict[str, str]]):
    zone = serializers.CharField(default="UTC")

    def validate_zone(self, zone: str) -> str:
        try:
            ZoneInfo(zone)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise serializers.ValidationError("Not an IANA time zone such as 'Europe/Paris'.") from None
        return zone


class TimeAnswer(serializers.Serializer[dict[str, str]]):
    zone = serializers.CharField()
    time = serializers.DateTimeField()


class TimeView(APIView):
    """Return the time in a time zone. A call costs one request."""

    throttle_scope = "time"

    @extend_schema(parameters=[TimeQuery], responses=TimeAnswer)
    def get(self, request: Request) -> Response:
        query = TimeQuery(data=request.query_params)
        query.is_valid(raise_exception=True)
        zone = query.validated_data["zone"]
        return Response({"zone": zone, "time": timezone.now().astimezone(ZoneInfo(zone)).isoformat()})


class TextQuery(serializers.Serializer[dict[str, str]]):
    text = serializers.CharField(max_length=20_000)


class TextAnswer(serializers.Serializer[dict[str, object]]):
    tokens = serializers.IntegerField()
    frequent = serializers.DictField(child=serializers.IntegerField())


class TextView(APIView):
    """Count the words of a text. A call costs one request, and one token for each word."""

    throttle_scope = "text"

    def throttle_cost(self, request: Request) -> dict[str, int]:
        text = request.data.get("text", "") if isinstance(request.data, dict) else ""
        return {"requests": 1, "tokens": len(WORD.findall(str(text)))}

    @extend_schema(request=TextQuery, responses=TextAnswer)
    def post(self, request: Request) -> Response:
        query = TextQuery(data=request.data)
        query.is_valid(raise_exception=True)
        words = WORD.findall(query.validated_data["text"].lower())
        return Response({"tokens": len(words), "frequent": dict(Counter(words).most_common(5))})


class StreamQuery(serializers.Serializer[dict[str, object]]):
    text = serializers.CharField(max_length=20_000)
    max_tokens = serializers.IntegerField(default=100, min_value=1, max_value=1000)


class StreamView(APIView):
    """Stream the words of a text one by one, as a language model does. A call costs one request, and one token a word.

    Before the view begins, the request is charged `max_tokens` tokens. When the stream ends, the view settles the
    request: the charge becomes the number of words that were sent. The view also settles the request if the client
    closes the connection.
    """

    throttle_scope = "stream"

    def throttle_cost(self, request: Request) -> dict[str, int]:
        query = StreamQuery(data=request.data)
        # An invalid request costs no tokens, because the view refuses it.
        return {"requests": 1, "tokens": query.validated_data["max_tokens"] if query.is_valid() else 0}

    @extend_schema(request=StreamQuery, responses={(200, "text/plain"): str})
    def post(self, request: Request) -> StreamingHttpResponse:
        query = StreamQuery(data=request.data)
        query.is_valid(raise_exception=True)
        words = WORD.findall(query.validated_data["text"])[: query.validated_data["max_tokens"]]

        def stream() -> Iterator[str]:
            sent = 0
            try:
                for word in words:
                    sent += 1
                    yield f"{word} "
            finally:
                settle(request, {"tokens": sent})

        return StreamingHttpResponse(stream(), content_type="text/plain")
