//! Tests of what templates do with texts, by the habits of real ones.

use expect_test::{Expect, expect};

use minijinja::machinery::parse;

use super::*;

fn tree(source: &str) -> Stmt<'_> {
    parse(source, "template", super::super::syntax()).unwrap()
}

fn check(source: &str, expected: &Expect) {
    let said = match requirements(&tree(source)) {
        None => "looks inside".to_owned(),
        Some(TextRequirements {
            trimmed,
            without,
            time,
        }) => format!("trimmed {trimmed}, without {without:?}, time {time}"),
    };
    expected.assert_eq(&said);
}

#[test]
fn texts_that_are_printed_joined_and_asked_for_are_passed_on() {
    for source in [
        "{% for m in messages %}<{{ m.role }}>{{ m['content'] }}{% endfor %}",
        "{% set list = messages[1:] %}{% for m in list %}{{ 'a' + m.content ~ 'b' }}{% endfor %}",
        "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% else %}\
         {% set system = 'none' %}{% endif %}{{ system }}",
        "{% for m in messages %}{% if m.content is string and m.content %}{{ m.get('content') }}\
         {% elif m.content == none or m.content != '' %}x{% endif %}{% endfor %}",
        "{% set ns = namespace(system='', n=1) %}{% for m in messages %}\
         {% set ns.system = ns.system + m.content %}{% set ns.n = ns.n + 1 %}{% endfor %}\
         {{ ns.system }}{{ ns.n }}",
        "{% macro show(text, end='.') %}{{ text }}{{ end }}{% endmacro %}\
         {% for m in messages %}{{ show(m.content) }}{{ show(end='!', text=m.role) }}{% endfor %}",
        "{% set all %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}{{ all }}",
        "{% for m in messages %}{% if loop.previtem is defined and loop.previtem.role == m.role %}\
         {{ raise_exception('twice ' + m.content) }}{% endif %}{% endfor %}",
        "{% for i in range(messages|length) %}{{ messages[i].content }}{% endfor %}",
        "{% for m in messages if m.role != 'system' %}{{ 'tool_calls' in m }}{% endfor %}",
        "{% for m in messages | selectattr('role', 'equalto', 'user') | list %}{{ m.content }}{% endfor %}",
    ] {
        check(source, &expect!["trimmed false, without [], time false"]);
    }
}

#[test]
fn some_questions_make_demands() {
    check(
        "{% for m in messages %}{{ m.content | trim }}{{ (m.content + ' ').strip() }}{% endfor %}",
        &expect!["trimmed true, without [], time false"],
    );
    check(
        "{% for m in messages %}{% set text = m.content %}{% if '</think>' in text %}\
         {% set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}\
         {% if text.startswith('<tool>') %}-{% endif %}{{ text }}{% endfor %}",
        &expect![[r#"trimmed true, without ["</think>", "<tool>"], time false"#]],
    );
    check(
        "{{ strftime_now('%Y') }}{{ messages[0].content }}",
        &expect!["trimmed false, without [], time true"],
    );
}

#[test]
fn templates_that_look_inside_are_told() {
    for source in [
        "{{ messages[0].content | upper }}",
        "{{ messages[0].content | length }}",
        "{{ messages[0].content[0] }}",
        "{{ messages[0].content[1:] }}",
        "{% if messages[0].content == 'a' %}{% endif %}",
        "{% if messages[0].content > 'a' %}{% endif %}",
        "{% if 'a' in 'b' + messages[0].content %}{% endif %}",
        "{% if messages[0].content in ['a'] %}{% endif %}",
        "{% for c in messages[0].content %}{{ c }}{% endfor %}",
        "{{ messages[0].content.strip('x') }}",
        "{{ messages[0].content.replace('a', 'b') }}",
        "{{ messages[0].content.startswith(messages[0].role) }}",
        "{{ messages }}",
        "{{ messages[0] | tojson }}",
        "{{ messages | map(attribute='content') | join }}",
        "{{ messages | selectattr('content', 'equalto', 'a') | list | length }}",
        "{% for m in messages | sort(attribute='content') %}{{ m.role }}{% endfor %}",
        "{% for k in messages[0] %}{{ messages[0][k] }}{% endfor %}",
        "{% for k, v in messages[0].items() %}{{ v }}{% endfor %}",
        "{% set key = 'con' ~ 'tent' %}{{ messages[0][key] | upper }}",
        "{% set list = [messages[0].content] %}{{ list[0] | upper }}",
        "{% set ns = namespace(text=messages[0].content) %}{{ ns.text | upper }}",
        "{% set ns = namespace(x='') %}{% set a = ns %}{% set a.x = messages[0].content %}\
         {% if ns.x | length > 9 %}long{% endif %}",
        "{% set ns = namespace() %}{% set ns.text = messages[0].content %}{% set other = ns %}\
         {{ other.text | upper }}",
        "{% macro loud(text) %}{{ text | upper }}{% endmacro %}{{ loud(messages[0].content) }}",
        "{% set text %}{{ messages[0].content }}{% endset %}{{ text | upper }}",
        "{% filter upper %}{{ messages[0].content }}{% endfilter %}",
        "{% for m in messages %}{% set l = loop %}{{ l.previtem.content | upper }}{% endfor %}",
        "{% for m in messages %}{% if loop.changed(m.content) %}x{% endif %}{% endfor %}",
        "{{ later }}{% set text = messages[0].content %}{% for i in [1] %}{{ text | upper }}{% endfor %}",
        "{% for i in [1, 2] %}{{ word | upper }}{% set word = messages[0].content %}{% endfor %}",
        "{{ debug() }}",
        "{{ messages[0].content * 2 }}",
        "{% if 'a' == messages[0].content %}{% endif %}",
    ] {
        check(source, &expect!["looks inside"]);
    }
}
