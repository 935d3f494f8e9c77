"""Replacing functions of another package: all or none, everywhere, and back."""

import functools
import inspect
import sys
from types import ModuleType

import pytest

from hybridengine.integrations import _patching
from hybridengine.integrations._patching import PatchError, Patches, Replacement


def _module(name: str, source: str) -> ModuleType:
    module = ModuleType(name)
    sys.modules[name] = module
    exec(source, vars(module))
    return module


@pytest.fixture
def host(monkeypatch):
    """A package with a function, two modules that import it, and a class with methods."""
    monkeypatch.setattr(_patching.importlib.metadata, "version", lambda name: "1.2.3")
    before = set(sys.modules)
    package = _module("hostpkg", "")
    package.__path__ = []
    package.losses = _module(
        "hostpkg.losses",
        "def loss(x, scale=1.0): return x * scale\n"
        "def other(x, *, eps): return x + eps\n"
        "class Base:\n"
        "    def inherited(self, x): return x\n"
        "class Head(Base):\n"
        "    @staticmethod\n"
        "    def apply(x): return x\n"
        "    def forward(self, x): return x\n",
    )
    package.user = _module("hostpkg.user", "from hostpkg.losses import loss as renamed")
    yield package
    for name in set(sys.modules) - before:
        del sys.modules[name]


def _patches(*replacements: Replacement, versions: str = ">=1.2,<2") -> Patches:
    groups: dict[str, dict] = {}
    for r in replacements:
        groups.setdefault(r.group, {})[r.target.removeprefix("hostpkg.")] = r.function
    return Patches("hostpkg", versions, groups, ["losses"])


def _loss(x, scale=1.0):
    return "ours", x, scale


def test_replaced_everywhere_and_put_back(host):
    theirs = host.losses.loss
    patches = _patches(Replacement("hostpkg.losses.loss", _loss, "losses"))
    patches.patch()
    patches.patch()
    assert host.losses.loss is _loss
    assert host.user.renamed is _loss
    late = _module("hostpkg.late", "from hostpkg.losses import loss")
    patches.unpatch()
    patches.unpatch()
    assert host.losses.loss is host.user.renamed is late.loss is theirs


def test_methods_keep_their_kind(host):
    head = host.losses.Head
    theirs = dict(vars(head))

    def apply(x):
        return "ours", x

    def forward(self, x):
        return type(self), x

    def inherited(self, x):
        return "ours", x

    patches = _patches(
        Replacement("hostpkg.losses.Head.apply", staticmethod(apply), "losses"),
        Replacement("hostpkg.losses.Head.forward", forward, "losses"),
        Replacement("hostpkg.losses.Head.inherited", inherited, "losses"),
    )
    with patches.patched():
        assert head().apply(1) == ("ours", 1)
        assert head().forward(1) == (head, 1)
        assert head().inherited(1) == ("ours", 1)
        assert host.losses.Base().inherited(1) == 1
    assert dict(vars(head)) == theirs


def test_groups(host):
    def other(x, *, eps):
        return "ours"

    patches = _patches(
        Replacement("hostpkg.losses.loss", _loss, "losses"),
        Replacement("hostpkg.losses.other", other, "others"),
    )
    assert patches.groups == ("losses", "others")
    patches.patch("losses")
    with patches.patched("others"):
        assert host.losses.other is other
    assert host.losses.other is not other
    assert host.losses.loss is _loss, "what was patched before the block stays"
    with pytest.raises(PatchError, match="no group 'loses'; the groups are losses, others"):
        patches.patch("loses")
    patches.unpatch()


def test_put_back_after_an_exception(host):
    theirs = host.losses.loss
    patches = _patches(Replacement("hostpkg.losses.loss", _loss, "losses"))
    with pytest.raises(RuntimeError), patches.patched():
        raise RuntimeError
    assert host.losses.loss is theirs


@pytest.mark.parametrize(
    "ours",
    [
        lambda x: x,
        lambda x, scale: x,
        lambda x, scale=2.0: x,
        lambda x, scale=1: x,
        lambda scale=1.0, x=None: x,
        lambda y, scale=1.0: y,
        lambda x, scale=1.0, *, needed: x,
    ],
)
def test_another_signature_changes_nothing(host, ours):
    theirs = host.losses.other, host.losses.loss

    def other(x, *, eps):
        return x

    patches = _patches(
        Replacement("hostpkg.losses.other", other, "losses"),
        Replacement("hostpkg.losses.loss", ours, "losses"),
    )
    with pytest.raises(PatchError, match=r"hostpkg\.losses\.loss has the signature \(x, scale=1"):
        patches.patch()
    assert (host.losses.other, host.losses.loss) == theirs


def test_more_optional_parameters_are_accepted(host):
    def longer(x: float, scale: float = 1.0, extra: int = 3) -> float:
        return x

    patches = _patches(Replacement("hostpkg.losses.loss", longer, "losses"))
    with patches.patched():
        assert host.losses.loss is longer


def test_versions_and_missing_functions(host, monkeypatch):
    with pytest.raises(PatchError, match=r"hostpkg 1\.2\.3 is installed.*hostpkg<2,>=1\.3 only"):
        _patches(Replacement("hostpkg.losses.loss", _loss, "losses"), versions=">=1.3,<2").patch()
    for target in ("hostpkg.losses.gone", "hostpkg.gone.loss", "hostpkg.losses.Gone.apply"):
        with pytest.raises(PatchError, match=f"hostpkg has no {target}"):
            _patches(Replacement(target, _loss, "losses")).patch()
    monkeypatch.undo()
    with pytest.raises(PatchError, match=r"hostpkg is not installed; install hostpkg<2,>=1\.2"):
        _patches(Replacement("hostpkg.losses.loss", _loss, "losses")).patch()


def test_registries_are_rebound_and_put_back(host):
    theirs = host.losses.loss
    registry = _module(
        "hostpkg.registry", "from hostpkg.losses import loss\nLOSSES = {'plain': loss, 'none': 0}"
    )
    patches = _patches(Replacement("hostpkg.losses.loss", _loss, "losses"))
    with patches.patched():
        assert {"plain": _loss, "none": 0} == registry.LOSSES
    assert {"plain": theirs, "none": 0} == registry.LOSSES


def test_a_method_that_ray_has_wrapped_in_an_actor(host):
    base = host.losses.Base
    theirs = base.inherited

    @functools.wraps(theirs)
    def wrapper(self, *args, _ray_trace_ctx=None, **kwargs):
        return theirs(self, *args, **kwargs)

    parameter = inspect.Parameter("_ray_trace_ctx", inspect.Parameter.KEYWORD_ONLY, default=None)
    signature = inspect.signature(theirs)
    theirs.__signature__ = signature.replace(parameters=[*signature.parameters.values(), parameter])
    namespace = {"__ray_actor_class__": host.losses.Head, "inherited": wrapper}
    actor = type("Actor", (host.losses.Head,), namespace)()
    ours = Replacement("hostpkg.losses.Base.inherited", lambda self, x: ("ours", x), "losses")
    with _patches(ours).patched():
        assert actor.inherited(1) == host.losses.Head().inherited(1) == ("ours", 1)
    assert actor.inherited(1) == host.losses.Head().inherited(1) == 1
    assert vars(type(actor))["inherited"] is wrapper
