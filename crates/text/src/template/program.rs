//! A compiled template in which every step pays for what it does.
//!
//! Answers one question: how is a template that nobody has read run without harm? Its instructions are those that MiniJinja
//! compiles, but where one of them could make or search a value of any size, a filter of ours stands in its place that
//! pays first (`guards`). A name that begins with [`GUARD`] is no identifier, so no template can call or hide it.
//!
//! Invariant: a program prints what the template prints, or fails because it would cost too much.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

use minijinja::machinery::{
    CodeGenerator, Instruction, Instructions, eval, make_string_output, parse,
};
use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value};

use super::meter::Effort;
use super::text_use::TextRequirements;
use super::{bounds, guards, meter, text_use};

/// Begins the names of our filters and tests.
pub(super) const GUARD: &str = "!";
/// No slot for what a name was found to be: it is looked up each time.
const UNCACHED: u8 = u8::MAX;
/// Bytes of all sources together that are kept for the life of the process. Compiled templates refer to them.
const SOURCES_BYTES_MAX: usize = 256 << 20;

/// A template, compiled.
pub(super) struct Program {
    instructions: Instructions<'static>,
    /// What it asks of texts; none if it looks inside them.
    pub(super) requirements: Option<TextRequirements>,
    /// Filters and tests that it names.
    pub(super) filters: BTreeSet<&'static str>,
    pub(super) tests: BTreeSet<&'static str>,
}

impl Program {
    /// Compiles a template; an error says what is wrong with it.
    pub(super) fn compile(source: &str, syntax: &SyntaxConfig) -> Result<Self, String> {
        if let Some(obstacle) = bounds::obstacle(source, syntax.clone()) {
            return Err(obstacle);
        }
        let source = keep(source).ok_or("too many templates were loaded")?;
        let compiled = bounds::with_stack(|| compile(source, syntax));
        compiled.unwrap_or_else(|| Err("the parser failed".to_owned()))
    }

    /// Runs it.
    pub(super) fn run(
        &self,
        environment: &Environment<'static>,
        context: Value,
        effort: Effort,
        input_bytes: usize,
    ) -> Result<String, Error> {
        let mut text = String::new();
        let _metered = meter::begin(effort, input_bytes);
        let mut out = make_string_output(&mut text);
        let escape = AutoEscape::None;
        let blocks = BTreeMap::new();
        // The library panics on some operations (a step backwards through nothing, to name one).
        let run = AssertUnwindSafe(|| {
            eval(
                environment,
                &self.instructions,
                context,
                &blocks,
                &mut out,
                escape,
            )
            .map(|_| ())
        });
        let panicked = |_| Error::new(ErrorKind::InvalidOperation, "the library panicked");
        catch_unwind(run).unwrap_or_else(|panic| Err(panicked(panic)))?;
        drop(out);
        Ok(text)
    }
}

fn compile(source: &'static str, syntax: &SyntaxConfig) -> Result<Program, String> {
    let tree = parse(source, "template", syntax.clone()).map_err(|e| super::describe(&e))?;
    let requirements = text_use::requirements(&tree);
    let mut generator = CodeGenerator::new("template", source);
    generator.compile_stmt(&tree);
    let (instructions, blocks) = generator.finish();
    if !blocks.is_empty() {
        // They may call themselves, and nobody counts how deep.
        return Err("it has blocks, which chat templates have not".to_owned());
    }
    let mut names = Names::default();
    Ok(Program {
        instructions: guarded(&instructions, &mut names),
        requirements,
        filters: names.filters,
        tests: names.tests,
    })
}

#[derive(Default)]
struct Names {
    filters: BTreeSet<&'static str>,
    tests: BTreeSet<&'static str>,
}

/// The same instructions, with ours in place of those that could cost anything.
fn guarded(plain: &Instructions<'static>, names: &mut Names) -> Instructions<'static> {
    let all: Vec<&Instruction<'static>> = (0..).map_while(|at| plain.get(at)).collect();
    let steps: Vec<Vec<Instruction<'static>>> = all.iter().map(|step| guard(step, names)).collect();
    // Where each old instruction begins now; one more, since jumps may go past the last.
    let mut begins = Vec::with_capacity(steps.len() + 1);
    let mut at = 0;
    for step in &steps {
        begins.push(at);
        at += step.len() as u32;
    }
    begins.push(at);
    let moved = |to: u32| begins.get(to as usize).copied().unwrap_or(at);
    let mut program = Instructions::new(plain.name(), plain.source());
    for (number, step) in steps.into_iter().enumerate() {
        let line = plain.get_line(number as u32).unwrap_or(0);
        let line = u16::try_from(line).unwrap_or(u16::MAX);
        for instruction in step {
            program.add_with_line(jumping(instruction, moved), line);
        }
    }
    program
}

/// An instruction whose target has moved.
fn jumping(step: Instruction<'static>, moved: impl Fn(u32) -> u32) -> Instruction<'static> {
    use Instruction as I;
    match step {
        I::Iterate(to) => I::Iterate(moved(to)),
        I::Jump(to) => I::Jump(moved(to)),
        I::JumpIfFalse(to) => I::JumpIfFalse(moved(to)),
        I::JumpIfFalseOrPop(to) => I::JumpIfFalseOrPop(moved(to)),
        I::JumpIfTrueOrPop(to) => I::JumpIfTrueOrPop(moved(to)),
        I::BuildMacro(name, to, flags) => I::BuildMacro(name, moved(to), flags),
        other => other,
    }
}

/// What stands in the place of an instruction.
fn guard(step: &Instruction<'static>, names: &mut Names) -> Vec<Instruction<'static>> {
    use Instruction as I;
    let ours = |name, values| I::ApplyFilter(name, Some(values), UNCACHED);
    match step {
        // Printed as a value, it is paid for as one.
        I::EmitRaw(text) => vec![I::LoadConst(Value::from(*text)), I::Emit],
        I::Add => vec![ours(guards::ADD, 2)],
        I::Mul => vec![ours(guards::MUL, 2)],
        I::StringConcat => vec![ours(guards::CONCAT, 2)],
        I::In => vec![ours(guards::IN, 2)],
        I::Eq => vec![ours(guards::EQ, 2)],
        I::Ne => vec![ours(guards::NE, 2)],
        I::Gt => vec![ours(guards::GT, 2)],
        I::Gte => vec![ours(guards::GTE, 2)],
        I::Lt => vec![ours(guards::LT, 2)],
        I::Lte => vec![ours(guards::LTE, 2)],
        I::GetItem => vec![ours(guards::ITEM, 2)],
        I::Slice => vec![ours(guards::SLICE, 4)],
        I::PushLoop(_) => vec![ours(guards::PAY_SHALLOW, 1), step.clone()],
        I::BuildMap(_) | I::BuildList(_) | I::BuildTuple(_) => {
            vec![step.clone(), ours(guards::PAY, 1)]
        }
        I::CallFunction(..) | I::CallMethod(..) | I::CallObject(_) => {
            vec![step.clone(), ours(guards::PAY, 1)]
        }
        // The value lies under the namespace that it is put into.
        I::SetAttr(_) => vec![
            I::Swap,
            ours(guards::NO_NAMESPACE, 1),
            I::Swap,
            step.clone(),
        ],
        I::ApplyFilter(name, values, slot) => {
            names.filters.insert(name);
            vec![I::ApplyFilter(guard_name(name), *values, *slot)]
        }
        I::PerformTest(name, values, slot) => {
            names.tests.insert(name);
            vec![I::PerformTest(guard_name(name), *values, *slot)]
        }
        other => vec![other.clone()],
    }
}

/// The name of our own filter or test before another.
fn guard_name(name: &str) -> &'static str {
    keep(&format!("{GUARD}{name}")).unwrap_or("")
}

/// A text for the life of the process; the same one for the same text. None when there are too many.
fn keep(text: &str) -> Option<&'static str> {
    static KEPT: Mutex<(BTreeSet<&'static str>, usize)> = Mutex::new((BTreeSet::new(), 0));
    let mut kept = KEPT
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    if let Some(known) = kept.0.get(text) {
        return Some(known);
    }
    if kept.1 + text.len() > SOURCES_BYTES_MAX {
        return None;
    }
    let leaked: &'static str = Box::leak(text.to_owned().into_boxed_str());
    kept.0.insert(leaked);
    kept.1 += leaked.len();
    Some(leaked)
}
