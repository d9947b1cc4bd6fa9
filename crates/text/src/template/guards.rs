//! The filters that stand in for what could cost anything: each pays, then does what the template asked for.
//!
//! Operators, indexing and loops have one each; a filter or test that a template names has one before it. What makes text longer
//! than it was (`replace`, `join`, `indent`, `format`, `batch`, `slice`) pays for its result before it makes it, by whatever
//! name it is called.

use std::fmt::Write;
use std::sync::LazyLock;

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Expression, State, Value, filters};

use super::meter::{NAMESPACE_INSIDE, charge, charge_all, charge_shallow, is_namespace, too_much};
use super::program::{GUARD, Program};

pub(super) const ADD: &str = "!+";
pub(super) const MUL: &str = "!*";
pub(super) const CONCAT: &str = "!~";
pub(super) const IN: &str = "!in";
pub(super) const EQ: &str = "!==";
pub(super) const NE: &str = "!!=";
pub(super) const GT: &str = "!>";
pub(super) const GTE: &str = "!>=";
pub(super) const LT: &str = "!<";
pub(super) const LTE: &str = "!<=";
pub(super) const ITEM: &str = "![]";
pub(super) const SLICE: &str = "![:]";
/// Pays for a value with all that is in it.
pub(super) const PAY: &str = "!pay";
/// Refuses a namespace: one inside another could hold itself, and would never be freed.
pub(super) const NO_NAMESPACE: &str = "!no-namespace";
/// Pays for going through a value once.
pub(super) const PAY_SHALLOW: &str = "!pay-shallow";

/// Begins the names of library filters that ours stand in for.
const PLAIN: &str = "!plain ";
/// Largest number that a filter may be given as a width or a count.
const COUNT_MAX: i64 = 100_000;
/// Digits of a width in a format.
const WIDTH_DIGITS_MAX: usize = 4;
/// Filters that look at a value without going through it.
const CHEAP: [&str; 8] = [
    "length", "count", "default", "d", "first", "last", "list", "reverse",
];

type Answer = Result<Value, Error>;

/// Adds what every template needs.
pub(super) fn add_to(environment: &mut Environment<'static>) {
    let env = environment;
    env.remove_global("debug");
    env.remove_filter("pprint");
    env.add_filter(ADD, add);
    env.add_filter(MUL, mul);
    env.add_filter(CONCAT, concat);
    env.add_filter(IN, contains);
    env.add_filter(EQ, |a: &Value, b: &Value| compare(a, b, |a, b| a == b));
    env.add_filter(NE, |a: &Value, b: &Value| compare(a, b, |a, b| a != b));
    env.add_filter(GT, |a: &Value, b: &Value| compare(a, b, |a, b| a > b));
    env.add_filter(GTE, |a: &Value, b: &Value| compare(a, b, |a, b| a >= b));
    env.add_filter(LT, |a: &Value, b: &Value| compare(a, b, |a, b| a < b));
    env.add_filter(LTE, |a: &Value, b: &Value| compare(a, b, |a, b| a <= b));
    env.add_filter(ITEM, item);
    env.add_filter(SLICE, slice);
    env.add_filter(PAY, |value: Value| charge_all(&value).map(|()| value));
    env.add_filter(NO_NAMESPACE, |value: Value| match is_namespace(&value) {
        true => Err(too_much(NAMESPACE_INSIDE)),
        false => Ok(value),
    });
    env.add_filter(PAY_SHALLOW, |value: Value| {
        charge_shallow(&value).map(|()| value)
    });
    env.add_filter(format!("{PLAIN}replace"), filters::replace);
    env.add_filter(format!("{PLAIN}join"), filters::join);
    env.add_filter(format!("{PLAIN}indent"), filters::indent);
    env.add_filter(format!("{PLAIN}format"), filters::format);
    env.add_filter(format!("{PLAIN}batch"), filters::batch);
    env.add_filter(format!("{PLAIN}slice"), filters::slice);
    for name in ["replace", "join", "indent", "format", "batch", "slice"] {
        let plain = format!("{PLAIN}{name}");
        let guard = move |state: &mut State<'_, '_>, args: Rest<Value>, named: Kwargs| {
            let args = all_of(args, named);
            pay_for_growth(name, &args)?;
            state.apply_filter(&plain, &args)
        };
        env.add_filter(name, guard);
    }
}

/// Adds those before the filters and tests that a template names.
pub(super) fn add_for(environment: &mut Environment<'static>, program: &Program) {
    // Names may be written with white space in them.
    let plain = |name: &str| -> String { name.split_ascii_whitespace().collect() };
    for name in program.filters.iter().map(|name| plain(name)) {
        let key = format!("{GUARD}{name}");
        let guard = move |state: &mut State<'_, '_>, args: Rest<Value>, named: Kwargs| {
            let args = all_of(args, named);
            pay_for_arguments(&name, &args)?;
            let result = state.apply_filter(&name, &args)?;
            charge_all(&result)?;
            Ok::<_, Error>(result)
        };
        environment.add_filter(key, guard);
    }
    for name in program.tests.iter().map(|name| plain(name)) {
        let key = format!("{GUARD}{name}");
        let guard = move |state: &mut State<'_, '_>, args: Rest<Value>, named: Kwargs| {
            let args = all_of(args, named);
            pay_for_arguments(&name, &args)?;
            state.perform_test(&name, &args)
        };
        environment.add_test(key, guard);
    }
}

/// The arguments of a call as they came, those with names last.
fn all_of(args: Rest<Value>, named: Kwargs) -> Vec<Value> {
    let mut all = args.0;
    if named.args().next().is_some() {
        all.push(Value::from(named));
    }
    all
}

/// Pays for a call of a method; its result is paid for where it goes on.
pub(super) fn call_method(
    name: &str,
    value: &Value,
    args: &[Value],
    call: impl FnOnce() -> Answer,
) -> Answer {
    let all: Vec<Value> = std::iter::once(value).chain(args).cloned().collect();
    match (name, args) {
        // A string that joins a list has it as its argument.
        ("join", [list, ..]) => pay_for_growth(name, &[list.clone(), value.clone()])?,
        _ => pay_for_growth(name, &all)?,
    }
    pay_for_arguments(name, &all)?;
    call()
}

fn pay_for_arguments(name: &str, args: &[Value]) -> Result<(), Error> {
    if CHEAP.contains(&name) {
        return charge(args.len() as u64);
    }
    args.iter().try_for_each(|arg| match arg.kind() {
        ValueKind::Seq | ValueKind::Map if ["get", "items", "keys", "values"].contains(&name) => {
            charge_shallow(arg)
        }
        _ => charge_all(arg),
    })
}

/// Pays for the result of what makes text longer than it was.
fn pay_for_growth(name: &str, args: &[Value]) -> Result<(), Error> {
    let text = |at: usize| args.get(at).and_then(Value::as_str).unwrap_or_default();
    let number = numbers(args).max().unwrap_or(0);
    match name {
        "replace" => {
            let (from, to) = (text(1), text(2));
            let places = match from.is_empty() {
                true => text(0).len() + 1,
                false => text(0).matches(from).count(),
            };
            charge(product(places, to.len()))
        }
        "join" => {
            let Some(list) = args.first() else {
                return Ok(());
            };
            charge_all(list)?;
            let items = list.len().unwrap_or(0);
            charge(product(items, text(1).len()))
        }
        "indent" => {
            check_count(number)?;
            let lines = text(0).matches('\n').count() + 1;
            charge(product(lines, usize::try_from(number).unwrap_or(4).max(4)))
        }
        "batch" | "slice" => check_count(number),
        "format" => check_format(text(0)),
        _ => Ok(()),
    }
}

/// The numbers among the arguments after the first, those with names included.
fn numbers(args: &[Value]) -> impl Iterator<Item = i64> + '_ {
    args.iter().skip(1).flat_map(|arg| {
        let keys = match arg.is_kwargs() {
            true => arg.try_iter().ok(),
            false => None,
        };
        let named = keys.into_iter().flatten();
        let named = named.filter_map(move |key| arg.get_item(&key).ok()?.as_i64());
        arg.as_i64().into_iter().chain(named)
    })
}

fn product(one: usize, other: usize) -> u64 {
    (one as u64).saturating_mul(other as u64)
}

fn check_count(count: i64) -> Result<(), Error> {
    match count > COUNT_MAX {
        true => Err(too_much(
            "it asks for a count or a width of more than 100000",
        )),
        false => Ok(()),
    }
}

/// A format may ask for any width, and for the same argument any number of times: neither is done by templates.
fn check_format(format: &str) -> Result<(), Error> {
    let mut digits = 0;
    for byte in format.bytes() {
        digits = if byte.is_ascii_digit() { digits + 1 } else { 0 };
        if digits > WIDTH_DIGITS_MAX || byte == b'*' {
            return Err(too_much("it formats with a width that is too large"));
        }
    }
    Ok(())
}

/// What MiniJinja does for an operator on values that are not handled here.
macro_rules! operation {
    ($name:ident, $source:literal) => {
        fn $name(a: &Value, b: &Value) -> Answer {
            static OPERATION: LazyLock<Option<Expression<'static, 'static>>> =
                LazyLock::new(|| OPERATORS.compile_expression($source).ok());
            evaluate(OPERATION.as_ref(), [("a", a), ("b", b)])
        }
    };
}

static OPERATORS: LazyLock<Environment<'static>> = LazyLock::new(Environment::new);

operation!(plain_add, "a + b");
operation!(plain_mul, "a * b");
operation!(plain_in, "b in a");

fn evaluate<'v>(
    operation: Option<&Expression<'static, 'static>>,
    names: impl IntoIterator<Item = (&'static str, &'v Value)>,
) -> Answer {
    let missing = || Error::new(ErrorKind::InvalidOperation, "unknown operation");
    let context = names.into_iter().map(|(name, value)| (name, value.clone()));
    let operation = operation.ok_or_else(missing)?;
    operation.eval(Value::from_pairs(context))
}

fn add(a: &Value, b: &Value) -> Answer {
    if let (Some(a), Some(b)) = (a.as_str(), b.as_str()) {
        charge((a.len() + b.len()) as u64)?;
        return Ok(Value::from([a, b].concat()));
    }
    if is_list(a) && is_list(b) {
        charge_shallow(a)?;
        charge_shallow(b)?;
    }
    plain_add(a, b)
}

fn is_list(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
}

fn mul(a: &Value, b: &Value) -> Answer {
    let times = |value: &Value, times: &Value| -> Result<(), Error> {
        let len = match value.as_str() {
            Some(text) => text.len(),
            None if is_list(value) => value.len().unwrap_or(0).saturating_mul(32),
            None => return Ok(()),
        };
        let times = times.as_i64().and_then(|n| usize::try_from(n).ok());
        charge(product(len, times.unwrap_or(0)))
    };
    times(a, b)?;
    times(b, a)?;
    plain_mul(a, b)
}

fn concat(a: &Value, b: &Value) -> Answer {
    let mut text = String::new();
    for value in [a, b] {
        charge_all(value)?;
        match value.as_str() {
            Some(part) => text.push_str(part),
            None => write!(text, "{value}").map_err(Error::from)?,
        }
    }
    Ok(Value::from(text))
}

fn contains(item: &Value, container: &Value) -> Answer {
    match (container.as_str(), item.as_str()) {
        (Some(text), Some(part)) => {
            charge(text.len() as u64)?;
            Ok(Value::from(text.contains(part)))
        }
        _ => {
            charge_all(item)?;
            charge_shallow(container)?;
            plain_in(container, item)
        }
    }
}

fn compare(a: &Value, b: &Value, holds: impl FnOnce(&Value, &Value) -> bool) -> Answer {
    // Of two texts no more is looked at than the shorter one has.
    let shorter = match (a.as_str(), b.as_str()) {
        (Some(one), Some(other)) if one.len() > other.len() => b,
        (None, Some(_)) => b,
        _ => a,
    };
    charge_all(shorter)?;
    Ok(Value::from(holds(a, b)))
}

fn item(value: &Value, key: &Value) -> Answer {
    if let Some(text) = value.as_str() {
        charge(text.len() as u64)?;
    }
    value.get_item(key)
}

fn slice(value: &Value, start: &Value, stop: &Value, step: &Value) -> Answer {
    static OPERATION: LazyLock<Option<Expression<'static, 'static>>> =
        LazyLock::new(|| OPERATORS.compile_expression("a[b:c:d]").ok());
    charge_shallow(value)?;
    let names = [("a", value), ("b", start), ("c", stop), ("d", step)];
    evaluate(OPERATION.as_ref(), names)
}
