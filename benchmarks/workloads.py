"""Programs that benchmarks run in sandboxes, with the natural variation of real runs.

A workload makes a command line of a seed: the same for the same seed, and for another one another selection of modules,
tests, files and arguments, so that two runs read most of the same and each something of its own. All but ``django`` are
for the image debian:workloads, and take 0.2 to 5 s on a node that has everything; none needs a network.

Every command prints as its last line what :attr:`Workload.done` matches, and only if all that it did came out right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

Command = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """A program.

    Attributes:
        name: what tables call it.
        about: what it does, in a few words.
        done: regular expression of the last line of a run that went well.
    """

    name: str
    about: str
    done: str
    _make: Callable[[Random], Command]

    def command(self, seed: int) -> Command:
        """The command line; of equal seeds, equal ones."""
        return self._make(Random(f"{self.name} {seed}"))

    def is_done(self, output: str) -> bool:
        """Whether a run that printed this went well."""
        lines = output.strip().splitlines()
        return bool(lines) and re.fullmatch(self.done, lines[-1]) is not None


def _steps(word: str, steps: Sequence[str], *, before: str = "", login: bool = False) -> Command:
    """A shell that counts the steps that went well, and says how many of how many."""
    counted = [f"{{ {step}\n}} >/dev/null && n=$((n+1))" for step in steps]
    script = "\n".join(["set -o pipefail; n=0", before, *counted, f"echo {word} $n of {len(steps)}"])
    return ("bash", "-lc" if login else "-c", script)


# --- shell

_PROGRAMS = ("cp", "diff", "find", "grep", "ls", "make", "mawk", "sed", "sort", "tar")
_PLACES = ("/etc", "/usr/lib/python3.11/json", "/usr/lib/python3.11/asyncio", "/usr/share/perl5")
_WORDS = ("import", "return", "error", "file", "path", "value")
_SHELL: tuple[str, ...] = (
    "ls -lR {place} | wc -l",
    "grep -rl {word} {place} | sort | sed -n 1,20p",
    "find {place} -type f -size +4k | sort | tail -n 5",
    "tar -cf - {place} 2>/dev/null | gzip -1 | wc -c",
    "sha256sum /usr/bin/{program}",
    "md5sum /usr/bin/{program}",
    "head -c 65536 /usr/bin/{program} | od -c | tail -n 1",
    "awk -F: '{{ n += $3 }} END {{ print n }}' /etc/passwd",
    "sed -n 's/root/{word}/p' /etc/passwd /etc/group",
    "perl -MPOSIX -e 'print strftime(\"%Y\", gmtime({number}))'",
    "perl -MFile::Find -e 'find(sub {{ $n++ }}, \"{place}\"); print $n'",
    "seq 1 {number} | shuf | sort -n | uniq | tail -n 1",
    "diff -u /etc/profile /etc/bash.bashrc | cut -c 1-40; true",
    "du -s {place}",
    "stat -c %s /usr/bin/{program} | xargs expr 1 +",
    "tr a-z A-Z < /etc/os-release | base64 | fold -w 40 | tac",
    "cp -r {place} /tmp/copy && rm -r /tmp/copy",
    "date -d @{number} +%F; id; uname -a",
    "env | sort | paste -s -d , | cksum",
    "getent passwd root && getent group tty",
    "split -n 4 /usr/bin/{program} /tmp/part. && cat /tmp/part.* | cmp - /usr/bin/{program}",
    "gzip -1 < /usr/bin/{program} | gunzip | wc -c",
)


def _shell(random: Random) -> Command:
    steps = [
        step.format(
            place=random.choice(_PLACES),
            program=random.choice(_PROGRAMS),
            word=random.choice(_WORDS),
            number=random.randrange(1000, 9000),
        )
        for step in random.sample(_SHELL, 17)
    ]
    return _steps("shell", steps, login=True)


# --- numpy and pandas

_NUMPY: tuple[str, ...] = (
    "a = np.random.default_rng({n}).random((60, 60)); assert np.allclose(np.linalg.inv(a) @ a, np.eye(60))",
    "a = np.arange({n}.0); assert np.allclose(np.fft.ifft(np.fft.fft(a)).real, a)",
    "p = np.polynomial.Polynomial.fromroots([1, 2, 3]); assert np.allclose(sorted(p.roots()), [1, 2, 3])",
    "a = np.ma.masked_less(np.arange({n}), 10); assert a.count() == {n} - 10",
    "np.save('/tmp/a.npy', np.arange({n})); assert len(np.load('/tmp/a.npy')) == {n}",
    "assert np.loadtxt(io.StringIO('1 2\\n3 4')).sum() == 10",
    "d = pd.DataFrame({{'k': np.arange({n}) % 7, 'v': 1}}); assert d.groupby('k').v.sum().sum() == {n}",
    "d = pd.DataFrame({{'k': range(9)}}); assert len(d.merge(d, on='k')) == 9",
    "assert pd.read_csv(io.StringIO('a,b\\n1,2\\n')).b[0] == 2",
    "s = pd.Series(1.0, pd.date_range('2024-01-01', periods={n}, freq='h')); assert s.resample('D').sum().sum() == {n}",
    "assert pd.Series(range({n})).rolling(5).mean().dropna().iloc[0] == 2",
    "d = pd.DataFrame({{'a': [1, 2]}}); assert pd.read_json(io.StringIO(d.to_json())).a.sum() == 3",
    "assert pd.Series(['ab', 'b']).str.contains('a').sum() == 1",
    "assert list(pd.Categorical(['x', 'y', 'x']).codes) == [0, 1, 0]",
    "d = pd.DataFrame({{'a': [1, 1], 'b': [1, 2], 'c': [3, 4]}}); assert d.pivot(index='a', columns='b').size == 2",
    "assert 'html' not in pd.DataFrame({{'a': [1]}}).to_html() and pd.interval_range(0, 5).size == 5",
)


def _numpy(random: Random) -> Command:
    chosen = [piece.format(n=random.randrange(100, 2000)) for piece in random.sample(_NUMPY, 5)]
    script = "\n".join(["import io, numpy as np, pandas as pd", *chosen, "print('numpy', pd.__version__)"])
    return ("python3", "-c", script)


# --- pytest

_TESTS: dict[str, tuple[str, ...]] = {
    "core": (
        "cache",
        "containers",
        "count_ops",
        "equal",
        "facts",
        "kind",
        "logic",
        "match",
        "operations",
        "symbol",
        "var",
    ),
    "combinatorics": ("partitions", "permutations", "prufer", "subsets"),
    "logic": ("inference",),
    "matrices": ("graph", "sparsetools"),
    "ntheory": ("digits",),
    "polys": ("densebasic", "monomials", "orderings", "rings"),
    "printing": ("conventions", "dot", "mathml", "python"),
    "sets": ("contains", "ordinals"),
    "utilities": ("enumerative", "iterables"),
}
"""Of sympy, those that take no longer than a second or so."""


def _pytest(random: Random) -> Command:
    tests = [f"sympy/{part}/tests/test_{name}.py" for part, names in _TESTS.items() for name in names]
    files = " ".join(random.sample(tests, 3))
    # Of plugins that nobody has run, pytest would rewrite and compile 70 modules.
    pytest = "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 python3 -m pytest -q -p no:cacheprovider"
    return ("bash", "-c", f"cd /src/sympy && {pytest} {files} | tail -n 1")


# --- a compiler

_C: tuple[tuple[str, str], ...] = (
    ("math.h", "fabs(sin({n}) * sin({n}) + cos({n}) * cos({n}) - 1) < 1e-9"),
    ("string.h", 'strlen("{n}") == sizeof("{n}") - 1'),
    ("ctype.h", "isdigit('7') && toupper('a') == 'A'"),
    ("time.h", "time(0) > {n}"),
    ("sys/stat.h", '!stat("/etc/passwd", &(struct stat){{0}})'),
    ("sys/socket.h", "AF_INET != AF_UNIX && sizeof(struct sockaddr_storage) >= 128"),
    ("netinet/in.h", "ntohs(htons({n})) == {n}"),
    ("pthread.h", "pthread_equal(pthread_self(), pthread_self())"),
    ("regex.h", '!regcomp(&(regex_t){{0}}, "a*b", REG_EXTENDED)'),
    ("wchar.h", 'wcslen(L"abc") == 3'),
    ("complex.h", "cabs(3 + 4 * I) == 5"),
    ("stdatomic.h", "atomic_fetch_add(&(atomic_int){{{n}}}, 1) == {n}"),
    ("inttypes.h", 'strtoimax("{n}", 0, 10) == {n}'),
    ("limits.h", "INT_MAX > {n}"),
    ("signal.h", "!sigemptyset(&(sigset_t){{0}})"),
    ("sys/mman.h", "mmap(0, {n}, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED"),
    ("dirent.h", 'opendir("/etc") != 0'),
    ("search.h", "(hdestroy(), hcreate({n}))"),
    ("fenv.h", "fegetround() == FE_TONEAREST"),
    ("locale.h", 'setlocale(LC_ALL, "C") != 0'),
    ("emmintrin.h", "_mm_cvtsi128_si32(_mm_set1_epi32({n})) == {n}"),
)


def _compile(random: Random) -> Command:
    chosen = [random.sample(_C, 4) for _ in range(4)]
    files = {f"part{number}.c": _part(random, number, pieces) for number, pieces in enumerate(chosen)}
    parts = range(len(chosen))
    calls = " + ".join(f"part{number}()" for number in parts)
    declared = "".join(f"int part{number}(void);\n" for number in parts)
    asked = sum(map(len, chosen))
    files["main.c"] = f"""#include <stdio.h>
{declared}int main(void) {{ printf("compiled %d of {asked}\\n", {calls}); return 0; }}
"""
    files["Makefile"] = f"main: main.o {' '.join(f'part{number}.o' for number in parts)}\n"
    options = f"-std=gnu11 -O{random.randrange(4)} {random.choice(('', '-g', '-Wall', '-pthread', '-static'))}"
    written = "".join(f"cat > {name} <<'END'\n{content}END\n" for name, content in files.items())
    script = f"cd /tmp\n{written}make -s CFLAGS='{options}' LDLIBS=-lm 2>/dev/null && ./main"
    return ("bash", "-c", script)


def _part(random: Random, number: int, pieces: Sequence[tuple[str, str]]) -> str:
    """A file with one function: how many of the checks come out right."""
    checks = " + ".join(f"!!({check.format(n=random.randrange(1000, 9000))})" for _, check in pieces)
    return (
        "".join(f"#include <{header}>\n" for header, _ in pieces) + f"int part{number}(void) {{ return {checks}; }}\n"
    )


# --- pip

_WHEELS = (
    *("attrs", "click", "docutils", "flask", "idna", "jinja2", "more-itertools", "networkx", "packaging", "pygments"),
    *("requests", "rich", "tomli", "tqdm", "urllib3", "werkzeug"),
)


def _pip(random: Random) -> Command:
    chosen = random.sample(_WHEELS, 2)
    install = "install -q --no-index --no-deps --no-cache-dir --disable-pip-version-check --find-links /wheels"
    names = " ".join(chosen)
    if random.random() < 0.5:
        into = f"python3 -m pip {install} --target /tmp/site {names}"
        python = "PYTHONPATH=/tmp/site python3"
    else:
        into = (
            f"python3 -m venv --without-pip /tmp/env && python3 -m pip --python /tmp/env/bin/python {install} {names}"
        )
        python = "/tmp/env/bin/python"
    look = f"from importlib.metadata import version; print('installed', *map(version, {chosen!r}))"
    return ("bash", "-c", f'{into} && {python} -c "{look}"')


# --- git

_GIT: tuple[str, ...] = (
    "git log --oneline | tail -n 1",
    "git log --stat -n {few} --skip {some} | wc -l",
    "git log -p -n 1 --skip {some} | wc -c",
    "git log --format=%an%at -- $(git ls-files | sed -n {some}p)",
    "git show --stat HEAD~{some} | tail -n 3",
    "git ls-tree -r HEAD | wc -l",
    "git grep -n {word} -- '*.py' | wc -l; true",
    "git grep -c {word} HEAD~{some} -- '*.rst' '*.txt' | wc -l; true",
    "git blame $(git ls-files '*.py' | sed -n {some}p) | wc -l",
    "git rev-list --count HEAD",
    "git diff --shortstat HEAD~{some} HEAD~{few}",
    "git cat-file -p HEAD^{{tree}} | wc -l",
    "git shortlog -s HEAD | wc -l",
    "grep -rn {word} --include='*.py' . | wc -l",
    "grep -rlE '{word}|class' --include='*.cfg' --include='*.toml' . | wc -l; true",
)


def _git(random: Random) -> Command:
    steps = [
        step.format(few=random.randrange(1, 5), some=random.randrange(5, 30), word=random.choice(_WORDS))
        for step in random.sample(_GIT, 7)
    ]
    return _steps("git", steps, before="cd /src/django")


# --- Django, of the images django:4.2.x

_APPS = ("admin", "messages", "sessions", "redirects", "flatpages", "humanize", "sitemaps", "syndication")
_ACTIONS: tuple[str, ...] = (
    "call_command('check', stdout=io.StringIO())",
    "call_command('migrate', verbosity=0)",
    "call_command('sqlmigrate', 'auth', '0001', stdout=io.StringIO())",
    "call_command('diffsettings', stdout=io.StringIO())",
    "call_command('showmigrations', stdout=io.StringIO())",
    "from django import template as t; assert t.Template('{{ a|upper }}').render(t.Context({'a': 'b'})) == 'B'",
    "from django import forms; assert forms.EmailField().clean('a@b.org')",
    "from django.utils import translation; translation.activate('de'); assert str(translation.gettext('Yes')) == 'Ja'",
    "from django.core import signing; assert signing.loads(signing.dumps([1])) == [1]",
    "from django.test import RequestFactory; assert RequestFactory().get('/a').path == '/a'",
    "from django.core.paginator import Paginator; assert Paginator(range(9), 2).num_pages == 5",
    "from django.utils.timesince import timesince; from django.utils import timezone; timesince(timezone.now())",
    "from django.core.cache import cache; cache.set('a', 1); assert cache.get('a') == 1",
    "from django.contrib.auth import hashers as h; assert h.check_password('a', h.make_password('a'))",
)


def _django(random: Random) -> Command:
    apps = ["auth", "contenttypes", "sites", *random.sample(_APPS, 3)]
    if "admin" in apps and "messages" not in apps:
        apps.append("messages")
    script = [
        "import io, django",
        "from django.conf import settings",
        "from django.core.management import call_command",
        "settings.configure(SECRET_KEY='k', SITE_ID=1, ROOT_URLCONF='urls',"
        " SILENCED_SYSTEM_CHECKS=[f'admin.E{number}' for number in range(400, 420)],"
        " DATABASES={'default': {'ENGINE': 'django.db.backends.sqlite3', 'NAME': ':memory:'}},"
        " TEMPLATES=[{'BACKEND': 'django.template.backends.django.DjangoTemplates', 'APP_DIRS': True}],"
        f" INSTALLED_APPS={[f'django.contrib.{app}' for app in apps]})",
        "import sys, types; urls = sys.modules['urls'] = types.ModuleType('urls'); urls.urlpatterns = []",
        "django.setup()",
        *random.sample(_ACTIONS, 4),
        "print('django', django.__version__)",
    ]
    return ("python3", "-c", "\n".join(script))


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("shell", "a login shell with 17 of 22 steps of common tools", r"shell 17 of 17", _shell),
        Workload("numpy", "import numpy and pandas, 5 of 16 computations", r"numpy [\d.]+", _numpy),
        Workload(
            "pytest", "3 of 31 test files of sympy in its source tree", r"(?!.*(\bfailed|error)).*\d+ passed.*", _pytest
        ),
        Workload(
            "compile",
            "make a C program of five files, each of four with 4 of 21 headers",
            r"compiled (\d+) of \1",
            _compile,
        ),
        Workload("pip", "install 2 of 16 local wheels, into a directory or a venv", r"installed \S+ \S+", _pip),
        Workload("git", "7 of 15 ways of git log, git grep and grep in the tree of Django", r"git 7 of 7", _git),
    )
}
"""Those of the image debian:workloads, by name."""
DJANGO = Workload("django", "set up Django, 3 of 8 apps and 4 of 14 things to do", r"django [\d.]+", _django)
"""Of the images django:4.2.x."""
