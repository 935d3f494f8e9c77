"""Replacing functions of another package: all or none, everywhere, and back."""

import functools
import importlib
import inspect
import re
import sys
from types import ModuleType

import pytest
import torch

from hybridengine.conformance.libraries.services import empty_services
from hybridengine.integrations import _patching
from hybridengine.integrations._compare import calling
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


def _patches(*replacements: Replacement, **checks: dict) -> Patches:
    groups: dict[str, dict] = {}
    for r in replacements:
        groups.setdefault(r.group, {})[r.target.removeprefix("hostpkg.")] = r.function
    return Patches("hostpkg", groups, ["losses"], **checks)


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
    with pytest.raises(PatchError, match=r"losses\.loss of hostpkg 1\.2\.3.*found \(x, scale=1"):
        patches.patch()
    assert (host.losses.other, host.losses.loss) == theirs


def test_more_optional_parameters_are_accepted(host):
    def longer(x: float, scale: float = 1.0, extra: int = 3) -> float:
        return x

    patches = _patches(Replacement("hostpkg.losses.loss", longer, "losses"))
    with patches.patched():
        assert host.losses.loss is longer


def test_missing_functions_and_packages(host):
    for target in ("hostpkg.losses.gone", "hostpkg.gone.loss", "hostpkg.losses.Gone.apply"):
        with pytest.raises(PatchError, match=f"{target} of hostpkg 1.2.3: expected a function"):
            _patches(Replacement(target, _loss, "losses")).patch()
    with pytest.raises(PatchError, match="absentpkg cannot be imported; install absent-pkg"):
        Patches("absentpkg", {"all": {"loss": _loss}}, distribution="absent-pkg").patch()


def _scaled(x, scale=1.0):
    return scale * x


def test_another_meaning_is_refused_by_name_and_changes_nothing(host):
    logits = torch.tensor([1.0, -2.0])
    probe = {"losses.loss": calling({"x": logits, "scale": 3.0}, ["x"])}
    patches = _patches(Replacement("hostpkg.losses.loss", _scaled, "losses"), probes=probe)
    theirs = host.losses.loss
    with patches.patched():
        assert host.losses.loss is _scaled
    sources = {
        "return x * scale + 1": "it gives 4 where ours gives 3",
        "return (x * scale).detach()": "it returns 1 values, ours returns 3",  # no gradient
        "return (x * scale)[None]": r"the shape \[1, 2\], ours \[2\]",
        "return x * scale, x": "it returns 4 values",
        "return (x, 1)[2]": "theirs raises IndexError",
    }
    for body, found in sources.items():
        exec(f"def loss(x, scale=1.0): {body}", vars(host.losses))
        changed = host.losses.loss
        with pytest.raises(
            PatchError, match=rf"hostpkg\.losses\.loss of .*found .*{found}.*'losses'"
        ):
            patches.patch()
        assert host.losses.loss is changed
    host.losses.loss = theirs


def test_a_function_that_lacks_a_package_is_not_probed(host):
    exec("def loss(x, scale=1.0): import absentpkg", vars(host.losses))
    probe = {"losses.loss": calling({"x": torch.ones(2)})}
    with _patches(Replacement("hostpkg.losses.loss", _scaled, "losses"), probes=probe).patched():
        assert host.losses.loss is _scaled


def test_code_with_a_new_name_is_refused(host):
    known = {"losses.loss": "device_of float"}
    patches = _patches(Replacement("hostpkg.losses.loss", _scaled, "losses"), known=known)
    with patches.patched():
        assert host.losses.loss is _scaled
    exec("def loss(x, scale=1.0): return [float(reset(i)) for i in x]", vars(host.losses))
    with pytest.raises(PatchError, match=r"losses\.loss of .*found code that uses reset\."):
        patches.patch()


def test_a_probe_leaves_the_generator_and_the_modes_alone(host):
    probe = {"losses.loss": calling({"x": torch.ones(2)}, ["x"])}
    patches = _patches(Replacement("hostpkg.losses.loss", _scaled, "losses"), probes=probe)
    state = torch.get_rng_state()
    with torch.inference_mode(), torch.device("meta"), patches.patched():
        assert host.losses.loss is _scaled
    assert torch.equal(torch.get_rng_state(), state)


INSTALLED = {"trl": "trl", "liger": "liger_kernel", "transformers": "transformers"}


@pytest.mark.parametrize("name", INSTALLED)
def test_the_installed_release_has_what_ours_replaces(name):
    pytest.importorskip(INSTALLED[name])
    patches = importlib.import_module(f"hybridengine.integrations.{name}").patch.__self__
    patches.check(*patches.groups)
    targets = {r.target.removeprefix(f"{patches.package}.") for r in patches.replacements}
    assert patches.probes.keys() | patches.known.keys() <= targets


def _changed(value):
    """Another value: floats are scaled and moved, and lists of lists lose an entry."""
    if isinstance(value, torch.Tensor):
        return value * 1.25 + 0.25 if value.is_floating_point() else value
    if isinstance(value, float):
        return value * 1.25 + 0.25
    if isinstance(value, dict):
        return {key: _changed(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return tuple(_changed(entry) for entry in value)
    return value[:-1] if isinstance(value, list) and isinstance(value[0], list) else value


def _computing_another(function):
    """Return the function, class or method with other results under the same signature."""
    if isinstance(function, type):
        apply = staticmethod(_computing_another(function.apply))
        return type(function.__name__, (function,), {"apply": apply})
    if isinstance(function, classmethod | staticmethod):
        return type(function)(_computing_another(function.__func__))

    @functools.wraps(function)
    def other(*args, **kwargs):
        return _changed(function(*_changed(args), **_changed(kwargs)))

    return other


def _using_another(function):
    """Return a function of the same signature whose code uses a name that theirs does not."""

    def other(*args, **kwargs):
        return new_name_of_theirs(*args, **kwargs)  # noqa: F821

    other.__signature__ = inspect.signature(function)
    return other


@pytest.mark.parametrize("name", [*INSTALLED, "verl"])
def test_every_function_that_means_something_else_is_refused_by_name(name, monkeypatch):
    """A release whose function computes something else, or uses another name, for each of ours."""
    services = ("ray", "tensordict", "codetiming", "hydra", "pylatexenc", "orjson")
    with empty_services(services):
        pytest.importorskip(INSTALLED.get(name, name))
        patches = importlib.import_module(f"hybridengine.integrations.{name}").patch.__self__
        changes = dict.fromkeys(patches.known, _using_another)
        for target, change in (changes | dict.fromkeys(patches.probes, _computing_another)).items():
            full = f"{patches.package}.{target}"
            (ours,) = (r for r in patches.replacements if r.target == full)
            *path, last = full.split(".")
            owner = _resolved(path)
            only = Patches(
                patches.package,
                {"all": {target: ours.function}},
                probes={target: patches.probes[target]} if target in patches.probes else {},
                known={target: patches.known[target]} if target in patches.known else {},
            )
            only.check("all")
            found = "for a small input, found it (gives|returns)"
            if target in patches.known:
                found = "new_name_of_theirs"
            with monkeypatch.context() as changed:
                changed.setattr(owner, last, change(vars(owner)[last]))
                with pytest.raises(PatchError, match=f"{re.escape(full)} of .*{found}"):
                    only.check("all")


def _resolved(path):
    owner = importlib.import_module(path[0])
    for number, part in enumerate(path[1:], 2):
        if not hasattr(owner, part):
            importlib.import_module(".".join(path[:number]))
        owner = getattr(owner, part)
    return owner


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
