"""Parser of .proto files to descriptors: messages and enumerations of proto2 and proto3.

Services and options are skipped. Imports, extensions and groups are errors: a schema is one self-contained file.
"""

from __future__ import annotations

import re
from typing import Final

from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorProto

from headrace.errors import InvalidSchema
from headrace.limits import SCHEMA_DEPTH_MAX, SCHEMA_PARTS_MAX

_TOKEN: Final = re.compile(
    r"""\s+|//[^\n]*|/\*(?:[^*]|\*(?!/))*\*/|(?P<word>[A-Za-z_.][\w.]*|[0-9][\w.]*)|(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
    r"|(?P<sign>[-+{}\[\]()<>;,=:/])",
    re.ASCII,
)
_NUMBER: Final = re.compile(r"0[xX][0-9a-fA-F]{1,16}|[0-9]{1,19}", re.ASCII)
_NAME: Final = re.compile(r"[A-Za-z_]\w{0,249}", re.ASCII)
_FIELD_NUMBER_MAX: Final = (1 << 29) - 1

_Field = FieldDescriptorProto
SCALARS: Final = {
    name: getattr(_Field, f"TYPE_{name.upper()}")
    for name in (
        *("double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64"),
        *("fixed32", "fixed64", "sfixed32", "sfixed64", "bool", "string", "bytes"),
    )
}


def _tokens(source: str) -> list[str]:
    found: list[str] = []
    at = 0
    while at < len(source):
        match = _TOKEN.match(source, at)
        if match is None:
            line = source.count("\n", 0, at) + 1
            raise InvalidSchema(f"line {line}: {source[at : at + 20]!r} is not understood")
        if match.lastgroup is not None:
            found.append(match.group())
        at = match.end()
    return found


class _Parser:
    def __init__(self, source: str) -> None:
        self._tokens = _tokens(source)
        self._at = 0
        self._parts = 0
        self.file = FileDescriptorProto(name="schema.proto")

    # Tokens.

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _next(self) -> str:
        token = self._peek()
        if not token:
            raise InvalidSchema("the .proto source ends too early")
        self._at += 1
        return token

    def _expect(self, *wanted: str) -> str:
        token = self._next()
        if token not in wanted:
            raise InvalidSchema(f"{' or '.join(map(repr, wanted))} expected in the .proto source, not {token[:40]!r}")
        return token

    def _name(self) -> str:
        name = self._next()
        if not _NAME.fullmatch(name):
            raise InvalidSchema(f"{name[:40]!r} is no name")
        return name

    def _number(self) -> int:
        sign = -1 if self._peek() == "-" else 1
        if sign < 0:
            self._next()
        text = self._next()
        if not _NUMBER.fullmatch(text):
            raise InvalidSchema(f"{text[:40]!r} is no whole number")
        return sign * int(text, 16 if text[:2].lower() == "0x" else 8 if len(text) > 1 and text[0] == "0" and text.isdigit() else 10)

    def _skip_statement(self) -> None:
        """Skip to the next `;`, or over a block."""
        depth = 0
        while True:
            token = self._next()
            depth += (token == "{") - (token == "}")
            if depth <= 0 and token in (";", "}"):
                return

    def _skip_options(self) -> bool:
        """Skip the options `[ … ]` after a field."""
        if self._peek() != "[":
            return False
        depth = 0
        while True:
            token = self._next()
            depth += (token == "[") - (token == "]")
            if not depth:
                return True

    def _count(self) -> None:
        self._parts += 1
        if self._parts > SCHEMA_PARTS_MAX:
            raise InvalidSchema(f"the schema has more than {SCHEMA_PARTS_MAX} parts")

    # Declarations.

    def parse(self) -> FileDescriptorProto:
        while token := self._peek():
            match token:
                case "syntax":
                    self._syntax()
                case "package":
                    self._next()
                    self.file.package = self._next()
                    self._expect(";")
                case "message":
                    self._message(self.file.message_type.add(), 0)
                case "enum":
                    self._enum(self.file.enum_type.add())
                case "option" | "service":
                    self._skip_statement()
                case ";":
                    self._next()
                case "import":
                    raise InvalidSchema("imports are not supported: give a serialized FileDescriptorSet instead")
                case _:
                    raise InvalidSchema(f"{token[:40]!r} is not supported in a .proto source")
        return self.file

    def _syntax(self) -> None:
        self._next()
        self._expect("=")
        syntax = self._next().strip("\"'")
        self._expect(";")
        if syntax not in ("proto2", "proto3"):
            raise InvalidSchema(f"syntax {syntax[:40]!r} is not supported")
        if syntax == "proto3":
            self.file.syntax = syntax

    def _message(self, message: DescriptorProto, depth: int) -> None:
        self._count()
        if depth > SCHEMA_DEPTH_MAX:
            raise InvalidSchema(f"the schema is nested more than {SCHEMA_DEPTH_MAX} levels deep")
        self._expect("message")
        message.name = self._name()
        self._expect("{")
        while (token := self._peek()) != "}":
            match token:
                case "message":
                    self._message(message.nested_type.add(), depth + 1)
                case "enum":
                    self._enum(message.enum_type.add())
                case "oneof":
                    self._oneof(message)
                case "map":
                    self._map(message)
                case "reserved":
                    self._reserved(message)
                case "option":
                    self._skip_statement()
                case ";":
                    self._next()
                case "extensions" | "extend" | "group":
                    raise InvalidSchema(f"{token} is not supported in a .proto source")
                case _:
                    self._field(message, None)
        self._next()
        self._name_optionals(message)

    def _field(self, message: DescriptorProto, oneof: int | None) -> None:
        self._count()
        field = message.field.add(label=_Field.LABEL_OPTIONAL)
        if oneof is not None:
            field.oneof_index = oneof
        elif self._peek() in ("optional", "required", "repeated"):
            label = self._next()
            field.label = {"required": _Field.LABEL_REQUIRED, "repeated": _Field.LABEL_REPEATED}.get(label, _Field.LABEL_OPTIONAL)
            field.proto3_optional = label == "optional" and self.file.syntax == "proto3"
        elif self.file.syntax != "proto3":
            raise InvalidSchema(f"a field of proto2 is optional, required or repeated, not {self._peek()[:40]!r}")
        self._type(field, self._next())
        self._rest_of_field(field)

    def _rest_of_field(self, field: FieldDescriptorProto) -> None:
        field.name = self._name()
        self._expect("=")
        number = self._number()
        if not 1 <= number <= _FIELD_NUMBER_MAX:
            raise InvalidSchema(f"field {field.name} has the number {number}")
        field.number = number
        self._skip_options()
        self._expect(";")

    def _type(self, field: FieldDescriptorProto, name: str) -> None:
        if name == "group":
            raise InvalidSchema("group is not supported in a .proto source")
        if name in SCALARS:
            field.type = SCALARS[name]
        else:
            field.type_name = name  # the pool resolves it to a message or an enumeration

    def _oneof(self, message: DescriptorProto) -> None:
        self._next()
        index = len(message.oneof_decl)
        message.oneof_decl.add(name=self._name())
        self._expect("{")
        while self._peek() != "}":
            if self._peek() == "option":
                self._skip_statement()
            elif self._peek() == ";":
                self._next()
            else:
                self._field(message, index)
        self._next()

    def _map(self, message: DescriptorProto) -> None:
        """Parse a map, which is a repeated message of key and value."""
        self._count()
        self._next()
        self._expect("<")
        key_type = self._next()
        if key_type not in SCALARS or key_type in ("double", "float", "bytes"):
            raise InvalidSchema(f"{key_type[:40]!r} cannot be the key of a map")
        self._expect(",")
        value_type = self._next()
        self._expect(">")
        field = message.field.add(label=_Field.LABEL_REPEATED, type=_Field.TYPE_MESSAGE)
        self._rest_of_field(field)
        entry = message.nested_type.add(name="".join(word[:1].upper() + word[1:] for word in field.name.split("_")) + "Entry")
        entry.options.map_entry = True
        self._type(entry.field.add(name="key", number=1, label=_Field.LABEL_OPTIONAL), key_type)
        self._type(entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL), value_type)
        field.type_name = entry.name

    def _reserved(self, message: DescriptorProto) -> None:
        self._next()
        while True:
            if self._peek()[:1] in ("'", '"'):
                message.reserved_name.append(self._next()[1:-1])
            else:
                start = end = self._number()
                if self._peek() == "to":
                    self._next()
                    end = _FIELD_NUMBER_MAX if self._peek() == "max" and self._next() else self._number()
                if not 1 <= start <= end <= _FIELD_NUMBER_MAX:
                    raise InvalidSchema(f"reserved {start} to {end}")
                message.reserved_range.add(start=start, end=end + 1)
            if self._expect(",", ";") == ";":
                return

    def _enum(self, enum: EnumDescriptorProto) -> None:
        self._count()
        self._next()
        enum.name = self._name()
        self._expect("{")
        while (token := self._peek()) != "}":
            if token == "option":
                enum.options.allow_alias |= self._tokens[self._at + 1 : self._at + 4] == ["allow_alias", "=", "true"]
                self._skip_statement()
            elif token == "reserved":
                self._skip_statement()
            elif token == ";":
                self._next()
            else:
                self._count()
                name = self._name()
                self._expect("=")
                number = self._number()
                if not -(1 << 31) <= number < 1 << 31:
                    raise InvalidSchema(f"{name} has the number {number}")
                enum.value.add(name=name, number=number)
                self._skip_options()
                self._expect(";")
        self._next()

    def _name_optionals(self, message: DescriptorProto) -> None:
        """Add a oneof for each optional field of proto3, after the declared ones."""
        for field in message.field:
            if field.proto3_optional:
                field.oneof_index = len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{field.name}")


def parse_source(source: str) -> FileDescriptorProto:
    """Parse a .proto source. Names of types are not resolved yet. Raises `InvalidSchema`."""
    return _Parser(source).parse()
