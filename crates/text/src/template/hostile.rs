//! Templates that mean harm, and templates that chance wrote.

use kvasir_types::Rng;

use super::*;

const MESSAGES: &str =
    r#"[{"role":"system","content":"be brief"},{"role":"user","content":"hello there"}]"#;

fn load(source: &str) -> Result<ChatTemplate, LoadError> {
    ChatTemplate::new(vec![("default".into(), source.into())], Vec::new())
}

fn render(template: &ChatTemplate, effort: Effort) -> Result<String, TextError> {
    let input = ChatInput {
        messages: MESSAGES,
        add_generation_prompt: true,
        ..ChatInput::default()
    };
    let rendered = template.rendered(&input, effort);
    rendered.map(|prompt| prompt.as_str().to_owned())
}

/// The template is refused when it is loaded, or runs out of what it may spend, or prints no more than that.
fn is_harmless(source: &str, effort: Effort) -> Result<String, TextError> {
    let template = load(source).map_err(|error| TextError::TooMuch(error.to_string()))?;
    render(&template, effort)
}

/// Sixty times over, the value of `ns.x` becomes `grown`.
fn growing(start: &str, grown: &str) -> String {
    format!(
        "{{% macro twice(x) %}}{{{{ x }}}}{{{{ x }}}}{{% endmacro %}}\
         {{% set ns = namespace(x={start}) %}}\
         {{% for i in range(60) %}}{grown}{{% endfor %}}{{{{ ns.x }}}}"
    )
}

#[test]
fn what_doubles_is_stopped() {
    let text = [
        "{% set ns.x = ns.x ~ ns.x %}",
        "{% set ns.x = ns.x + ns.x %}",
        "{% set ns.x = ns.x * 2 %}",
        "{% set ns.x = 2 * ns.x %}",
        "{% set ns.x = ns.x | replace('a', 'aa') %}",
        "{% set ns.x = ns.x.replace('a', 'aa') %}",
        "{% set ns.x = ns.x | replace('', ns.x) %}",
        "{% set ns.x = [ns.x, ns.x] | join %}",
        "{% set ns.x = [ns.x, ns.x] | map('upper') | join(ns.x) %}",
        "{% set ns.x = [ns.x] | map('replace', 'a', ns.x) | first %}",
        "{% set ns.x = ''.join([ns.x, ns.x]) %}",
        "{% set ns.x = ns.x.join(['', '', '']) %}",
        "{% set ns.x = '%s%s' | format(ns.x, ns.x) %}",
        "{% set ns.x = '{}{}'.format(ns.x, ns.x) %}",
        "{% set ns.x = twice(ns.x) %}",
        "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}",
        "{% set ns.x = [ns.x, ns.x] | tojson %}",
        "{% set ns.x = {'a': ns.x, 'b': ns.x} | tojson(indent=4) %}",
        "{% set ns.x = [ns.x, ns.x] | string %}",
        "{% set ns.x = ns.x | urlencode ~ ns.x %}",
        "{% set ns.x = ns.x | indent(1000) ~ ns.x %}",
    ];
    let lists = [
        "{% set ns.x = ns.x + ns.x %}",
        "{% set ns.x = ns.x * 2 %}",
        "{% set ns.x = [ns.x, ns.x] %}",
        "{% set ns.x = (ns.x, ns.x) %}",
        "{% set ns.x = {'a': ns.x, 'b': ns.x} %}",
        "{% set ns.x = dict(a=ns.x, b=ns.x) %}",
        "{% set ns.x = namespace(a=ns.x, b=ns.x) %}",
        "{% set ns.x = ns.x | list + ns.x | list %}",
        "{% set ns.x = ns.x | chain(ns.x) | list %}",
    ];
    let text = text.map(|grown| growing("'aa\\nb'", grown));
    let lists = lists.map(|grown| growing("[1, 2]", grown));
    for source in text.iter().chain(&lists) {
        let printed = is_harmless(source, Effort::Brief);
        assert!(printed.is_err(), "{source}");
    }
    // With all that is ever spent it ends too; a few stand for all, since that takes a second each.
    for source in [&text[0], &text[1], &text[15], &lists[0]] {
        assert!(is_harmless(source, Effort::Full).is_err(), "{source}");
    }
}

#[test]
fn what_one_step_makes_huge_is_stopped() {
    for expression in [
        "'a' * 99999999",
        "[1] * 99999999",
        "'%99999999s' | format('a')",
        "'%*d' | format(99999999, 1)",
        "'{:99999999}'.format('a')",
        "'a' | indent(99999999, true)",
        "'a' | indent(width=99999999, first=true)",
        "[1] | batch(99999999, 0) | list",
        "[1] | slice(99999999) | list",
        "range(99999) | list | tojson(indent=16) ~ range(99999) | list",
    ] {
        let source = format!("{{{{ {expression} }}}}");
        let printed = is_harmless(&source, Effort::Brief);
        assert!(printed.is_err(), "{source}: {}", printed.unwrap().len());
    }
}

#[test]
fn what_takes_long_is_stopped() {
    let text = "x".repeat(20_000);
    let inner = [
        "{% for b in range(90000) %}x{% endfor %}".to_owned(),
        text,
        "{% if 'zz' in big %}x{% endif %}".to_owned(),
        "{% if big in big %}x{% endif %}".to_owned(),
        "{% if big == big ~ 'a' %}x{% endif %}".to_owned(),
        "{% if 99999 in list %}x{% endif %}".to_owned(),
        "{% if list == list %}x{% endif %}".to_owned(),
        "{% if list is eq(list) %}x{% endif %}".to_owned(),
        "{% set y = big[1:] %}".to_owned(),
        "{% set y = big[-1] %}".to_owned(),
        "{% set y = list[1:] %}".to_owned(),
        "{% for c in big %}{% break %}{% endfor %}".to_owned(),
        "{% set y = big | upper %}".to_owned(),
        "{% set y = big.split('a') %}".to_owned(),
        "{% set y = list | sort | list %}".to_owned(),
        "{% set y = list | unique | list %}".to_owned(),
    ];
    for step in inner {
        let source = format!(
            "{{% set big = 'ab' * 50000 %}}{{% set list = range(20000) | list %}}\
             {{% for a in range(90000) %}}{step}{{% endfor %}}"
        );
        let printed = is_harmless(&source, Effort::Brief);
        assert!(matches!(printed, Err(TextError::TooMuch(_))), "{step}");
    }
    let twice = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}";
    let printed = is_harmless(twice, Effort::Full);
    assert!(matches!(printed, Err(TextError::TooMuch(_))), "{printed:?}");
}

#[test]
fn what_nests_deeply_is_stopped() {
    for deeper in [
        "{% set ns.x = [ns.x] %}",
        "{% set ns.x = (ns.x,) %}",
        "{% set ns.x = {'a': ns.x} %}",
        "{% set ns.x = dict(a=ns.x) %}",
        "{% set ns.x = namespace(a=ns.x) %}",
        "{% set ns.x = [ns.x] | batch(1) | list %}",
        "{% set ns.x = [ns.x] | list %}",
        "{% set ns.x = [1] | zip([ns.x]) | list %}",
        "{% set ns.x = {'a': ns.x}.items() | list %}",
        "{% set ns.x = ns %}",
        "{% set ns.x = [ns] %}",
        "{% set ns.x = {'a': ns} %}",
        "{% set mk = dict %}{% set ns.x = mk(a=ns.x) %}",
        "{% set ns.x = {'mk': namespace}.mk(a=ns.x) %}",
        "{% set ns.x = [namespace][0](a=ns.x) %}",
    ] {
        let source = format!(
            "{{% set ns = namespace(x=1) %}}{{% for i in range(5000) %}}{deeper}{{% endfor %}}done"
        );
        let printed = is_harmless(&source, Effort::Full);
        assert!(printed.is_err(), "{deeper}: {printed:?}");
    }
    for source in [
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% macro m(n) %}{% for i in [1] %}{{ m(n ~ 'a') }}{% endfor %}{% endmacro %}{{ m('a') }}",
        "{% macro m() %}{% call n() %}{% endcall %}{% endmacro %}{% macro n() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for x in [1] recursive %}{{ loop([x]) }}{% endfor %}",
        "{% block a %}{{ self.a() }}{% endblock %}",
        "{% include 'default' %}",
        "{% extends 'template' %}",
        "{% import 'default' as d %}{{ d.x() }}",
    ] {
        assert!(is_harmless(source, Effort::Full).is_err(), "{source}");
    }
}

/// Parser, compiler and tree are as deep as a template makes them.
#[test]
fn what_would_overflow_the_stack_is_refused_or_parsed() {
    let many = |count: usize, part: &str| part.repeat(count);
    for count in [500, 4_000, 10_000, 100_000] {
        for source in [
            format!("{{{{ {}x }}}}", many(count, "not ")),
            format!("{{{{ {}x }}}}", many(count, "-")),
            format!("{{{{ {}x{} }}}}", many(count, "("), many(count, ")")),
            format!("{{{{ {}{} }}}}", many(count, "["), many(count, "]")),
            format!("{{{{ x{} }}}}", many(count, ".a")),
            format!("{{{{ x{} }}}}", many(count, "[0]")),
            format!("{{{{ x{} }}}}", many(count, "|trim")),
            format!("{{{{ x{} }}}}", many(count, " ~ x")),
            format!("{{{{ x{} }}}}", many(count, " and x")),
            format!("{{{{ x{} }}}}", many(count, " if x else x")),
            format!("{{{{ x{} }}}}", many(count, " < x")),
            format!("{{{{ x{} }}}}", many(count, " is not defined")),
            format!("{{% if x %}}{}{{% endif %}}", many(count, "{% elif x %}")),
            format!(
                "{}{}",
                many(count, "{% if x %}"),
                many(count, "{% endif %}")
            ),
            format!(
                "{}{}",
                many(count, "{% for a in x %}"),
                many(count, "{% endfor %}")
            ),
        ] {
            let _ = is_harmless(&source, Effort::Brief);
        }
    }
    let elifs = format!("{{% if x %}}{}{{% endif %}}ok", many(1000, "{% elif x %}"));
    assert_eq!(is_harmless(&elifs, Effort::Brief), Ok("ok".to_owned()));
    assert!(load(&many(200_000, "{{ x }}")).is_err(), "too long");
}

/// Templates from a grammar. Small numbers, so that most of them do something.
struct Author {
    rng: Rng,
    depth: u32,
}

impl Author {
    fn below(&mut self, bound: usize) -> usize {
        (self.rng.next_u64() % bound as u64) as usize
    }

    fn one(&mut self, of: &[&str]) -> String {
        of[self.below(of.len())].to_owned()
    }

    fn name(&mut self) -> String {
        self.one(&["a", "b", "ns.x", "ns.y", "messages", "m", "loop", "missing"])
    }

    fn expression(&mut self) -> String {
        if self.depth > 4 {
            return match self.below(3) {
                0 => self.name(),
                1 => self.one(&["0", "1", "7", "-3", "2.5", "true", "none", "100000"]),
                _ => self.one(&["''", "'ab'", "'a b\\n c'", "'\u{e9}x'", "'%s'", "'role'"]),
            };
        }
        self.depth += 1;
        let (x, y) = (self.expression(), self.expression());
        let made = match self.below(16) {
            0 => self.expression(),
            1 => {
                let op = self.one(&["~", "+", "*", "-", "//", "%", "**", "/"]);
                format!("({x} {op} {y})")
            }
            2 => {
                let op = self.one(&["==", "!=", "<", "<=", ">", ">=", "in", "not in"]);
                format!("({x} {op} {y})")
            }
            3 => {
                let op = self.one(&["and", "or"]);
                format!("({x} {op} {y})")
            }
            4 => format!("[{x}, {y}]"),
            5 => format!("({x}, {y})"),
            6 => format!("{{'k': {x}, 'j': {y}}}"),
            7 => {
                let filter = self.one(&[
                    "upper",
                    "trim",
                    "length",
                    "first",
                    "last",
                    "list",
                    "string",
                    "reverse",
                    "tojson",
                    "tojson(indent=2)",
                    "default('d')",
                    "replace('a', 'bb')",
                    "join",
                    "join('-')",
                    "int",
                    "indent(3)",
                    "unique|list",
                    "sort|list",
                    "items|list",
                    "batch(2)|list",
                    "format(1)",
                    "map('upper')|list",
                    "select('string')|list",
                    "map(attribute='role')|list",
                    "sum",
                    "max",
                ]);
                format!("({x}|{filter})")
            }
            8 => {
                let method = self.one(&[
                    "strip()",
                    "upper()",
                    "split('a')",
                    "split()",
                    "replace('a', 'cc')",
                    "startswith('a')",
                    "items()",
                    "get('role')",
                    "join(['x', 'y'])",
                    "partition('a')",
                    "rsplit('b')",
                    "count('a')",
                ]);
                format!("({x}).{method}")
            }
            9 => {
                let test = self.one(&[
                    "defined",
                    "none",
                    "string",
                    "mapping",
                    "iterable",
                    "sequence",
                    "number",
                    "in([1, 'a'])",
                    "eq(1)",
                    "odd",
                ]);
                let not = self.one(&["", "not "]);
                format!("({x} is {not}{test})")
            }
            10 => format!("({x})[{y}]"),
            11 => format!("({x})[1:]"),
            12 => format!("({x})[::-1]"),
            13 => format!("({x} if {y} else 'e')"),
            14 => format!("shout({x}, {y})"),
            _ => format!("range({})|list", self.below(9)),
        };
        self.depth -= 1;
        made
    }

    fn statements(&mut self) -> String {
        let count = self.below(4) + 1;
        (0..count).map(|_| self.statement()).collect()
    }

    fn statement(&mut self) -> String {
        let x = self.expression();
        if self.depth > 3 {
            return format!("{{{{ {x} }}}}");
        }
        self.depth += 1;
        let body = self.statements();
        let made = match self.below(9) {
            0 => "text \n".to_owned(),
            1 | 2 => format!("{{{{ {x} }}}}"),
            3 => {
                let to = self.one(&["a", "b", "ns.x", "ns.y"]);
                format!("{{% set {to} = {x} %}}")
            }
            4 => {
                let other = self.statements();
                format!("{{% if {x} %}}{body}{{%- else %}}{other}{{% endif -%}}")
            }
            5 => {
                let over = self.one(&["range(7)", "messages", "[1, 'a', none]", "ns.x", "a"]);
                format!("{{% for m in {over} %}}{body}{{% else %}}none{{% endfor %}}")
            }
            6 => format!("{{% set b %}}{body}{{% endset %}}"),
            7 => format!("{{% filter upper %}}{body}{{% endfilter %}}"),
            _ => format!(
                "{{% for m in range(300) %}}{{% if loop.index > 200 %}}{{% break %}}{{% endif %}}{body}{{% endfor %}}"
            ),
        };
        self.depth -= 1;
        made
    }

    fn template(seed: u64) -> String {
        let mut author = Self {
            rng: Rng::new(seed),
            // Shallow: of those that do much, most come to an error.
            depth: 3,
        };
        let body = author.statement();
        format!(
            "{{% set ns = namespace(x='', y=[1]) %}}{{% set a = 'ab' %}}{{% set b = 2 %}}\
             {{% macro shout(x, y) %}}{{{{ x }}}}!{{{{ y }}}}{{% endmacro %}}{body}"
        )
    }
}

/// The same template without our guards, with enough fuel for what ours can do.
fn unguarded(source: &str) -> Option<Result<String, String>> {
    let mut plain = environment();
    plain.set_fuel(Some(Effort::Brief.fuel()));
    plain
        .add_template_owned("default", source.to_owned())
        .ok()?;
    let list = messages(MESSAGES, ContentStyle::Text).unwrap();
    let list: Value = list.into_iter().map(|m| m.into_value()).collect();
    let _metered = meter::begin(Effort::Full, 1 << 20);
    let context = Value::from_pairs([
        ("messages", list),
        ("add_generation_prompt", Value::from(true)),
        ("tools", none()),
        ("documents", none()),
    ]);
    let template = plain.get_template("default").ok()?;
    // The library panics on some.
    let rendered = std::panic::AssertUnwindSafe(|| template.render(context));
    let rendered = std::panic::catch_unwind(rendered).ok()?;
    Some(rendered.map_err(|error| error.to_string()))
}

/// What chance writes never does harm, and prints what it would print without guards.
#[test]
fn templates_of_chance_do_no_harm_and_print_the_same() {
    let (mut printed, mut stopped) = (0, 0);
    for seed in 0..600 {
        let source = Author::template(seed);
        let ours = is_harmless(&source, Effort::Brief);
        if let Err(TextError::TooMuch(_)) = ours {
            stopped += 1;
            continue;
        }
        let granted = (8 << 20) + source.len();
        assert!(
            ours.as_ref().map_or(0, String::len) <= granted,
            "seed {seed}"
        );
        match (&ours, unguarded(&source)) {
            (Ok(ours), Some(Ok(theirs))) => {
                printed += 1;
                assert_eq!(ours, &theirs, "seed {seed}: {source}");
            }
            (Ok(_), Some(Err(error))) => panic!("seed {seed}: {error}: {source}"),
            (Err(error), Some(Ok(_))) => panic!("seed {seed}: {error}: {source}"),
            _ => {}
        }
    }
    assert!(printed > 50, "{printed} printed, {stopped} stopped");
}
