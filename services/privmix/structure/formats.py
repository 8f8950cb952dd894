"""Declares the formats of strings that answers follow. Other formats are annotations, as JSON Schema says.

Each is a list of regular expressions, all of which a string matches. They are narrower than the standards where
common readers refuse what a standard allows: there is no leap second and no year 0, hosts have no internationalized
labels, and no part of a duration is longer than Python's. Those from `uuid1` on are pydantic's.

Sources: RFC 3339 (dates), RFC 5321 (email), RFC 1123 (hosts), RFC 4291 (IPv6), RFC 9562 (UUID), RFC 3986 (URI),
RFC 6901 (JSON pointers).
"""

_MONTHS = (
    "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8])"
)
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = f"(?:{_YEAR}-(?:{_MONTHS})|{_LEAP}-02-29)"
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_CLOCK})"

_Y, _M, _W, _D = "[0-9]{1,4}Y", "[0-9]{1,5}M", "[0-9]{1,5}W", "[0-9]{1,6}D"
_H, _MIN, _S = "[0-9]{1,6}H", "[0-9]{1,7}M", "[0-9]{1,9}S"
_HOURS = f"T(?:{_H}(?:{_MIN}(?:{_S})?)?|{_MIN}(?:{_S})?|{_S})"
_DAYS = f"(?:{_Y}(?:{_M}(?:{_D})?)?|{_M}(?:{_D})?|{_D})"

_LABEL = "[A-Za-z0-9](?:-?[A-Za-z0-9])*"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"

_BYTE = "(?:[0-9]|[1-9][0-9]|1[0-9]{2}|2[0-4][0-9]|25[0-5])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_HEX = "[0-9A-Fa-f]{1,4}"
_LAST = f"(?:{_HEX}:{_HEX}|{_IPV4})"
_IPV6 = "|".join(
    [f"(?:{_HEX}:){{6}}{_LAST}"]
    + [f"(?:{_HEX}(?::{_HEX}){{0,{before}}})?::(?:{_HEX}:){{{4 - before}}}{_LAST}" for before in range(5)]
    + [f"::(?:{_HEX}:){{5}}{_LAST}"]
    + [f"(?:{_HEX}(?::{_HEX}){{0,5}})?::{_HEX}", f"(?:{_HEX}(?::{_HEX}){{0,6}})?::"]
)

_BITS4, _BITS6 = "(?:[0-9]|[12][0-9]|3[0-2])", "(?:[0-9]|[1-9][0-9]|1[01][0-9]|12[0-8])"
# Networks have no bits after their prefix. They end at a byte, or at 16 bits of IPv6.
_NETWORK4 = "|".join(
    [rf"{_IPV4}(?:/32)?", r"0\.0\.0\.0/0"]
    + [rf"{_BYTE}(?:\.{_BYTE}){{{count - 1}}}(?:\.0){{{4 - count}}}/{8 * count}" for count in range(1, 4)]
)
_NETWORK6 = "|".join(
    [f"(?:{_IPV6})(?:/128)?", "::/0"] + [f"{_HEX}(?::{_HEX}){{{count - 1}}}::/{16 * count}" for count in range(1, 8)]
)

_UUID_END = "[0-9A-Fa-f]{3}-[0-9A-Fa-f]{12}"

_PERCENT = "%[0-9A-Fa-f]{2}"
_PCHAR = f"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|{_PERCENT})"
_AUTHORITY = rf"(?:(?:[A-Za-z0-9._~!$&'()*+,;=:-]|{_PERCENT})*@)?(?:{_HOST})(?::[0-9]{{1,4}})?"
_TAIL = rf"(?:\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?"
_URI = rf"[A-Za-z][A-Za-z0-9+.-]*:(?://(?:{_AUTHORITY})?(?:/{_PCHAR}*)*|/?{_PCHAR}+(?:/{_PCHAR}*)*){_TAIL}"

_SHORT_LABELS = r"^[^.]{1,63}(?:\.[^.]{1,63})*$"


def _whole(expression: str) -> str:
    return f"^(?:{expression})$"


FORMATS: dict[str, tuple[str, ...]] = {
    "date": (_whole(_DATE),),
    "time": (_whole(_TIME),),
    "date-time": (_whole(f"{_DATE}T{_TIME}"),),
    "duration": (_whole(f"P(?:{_W}|{_DAYS}(?:{_HOURS})?|{_HOURS})"),),
    "email": (_whole(rf"{_ATOM}(?:\.{_ATOM})*@{_HOST}"), r"^[^@]{1,64}@[^.]{1,63}(?:\.[^.]{1,63})*$", "^.{1,254}$"),
    "hostname": (_whole(_HOST), _SHORT_LABELS, "^.{1,253}$"),
    "ipv4": (_whole(_IPV4),),
    "ipv6": (_whole(_IPV6),),
    "uuid": (_whole("[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"),),
    "uri": (_whole(_URI),),
    "json-pointer": (_whole("(?:/(?:[^~/]|~[01])*)*"),),
    **{
        f"uuid{version}": (_whole(f"[0-9A-Fa-f]{{8}}-[0-9A-Fa-f]{{4}}-{version}[0-9A-Fa-f]{{3}}-[89ABab]{_UUID_END}"),)
        for version in (1, 3, 4, 5, 6, 7, 8)
    },
    "ipvanyaddress": (_whole(f"{_IPV4}|{_IPV6}"),),
    "ipv4interface": (_whole(f"{_IPV4}(?:/{_BITS4})?"),),
    "ipv6interface": (_whole(f"(?:{_IPV6})(?:/{_BITS6})?"),),
    "ipvanyinterface": (_whole(f"{_IPV4}(?:/{_BITS4})?|(?:{_IPV6})(?:/{_BITS6})?"),),
    "ipv4network": (_whole(_NETWORK4),),
    "ipv6network": (_whole(_NETWORK6),),
    "ipvanynetwork": (_whole(f"{_NETWORK4}|{_NETWORK6}"),),
    "base64": (_whole("(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/][AQgw]==|[A-Za-z0-9+/]{2}[AEIMQUYcgkosw048]=)?"),),
}
