//! Does a template look into contents, or does it only pass them on?
//!
//! Answers one question: may the text of a message stand in for another in this template, so that a prompt
//! is known from the rest of the conversation and the texts alone? The template's syntax tree is walked with
//! three kinds of tainted value: the list of messages, a message, and its text (whole, or as part of a longer one).
//! Texts may be printed, joined, trimmed, asked whether they are there, and searched for fixed words; whatever
//! else is done to one makes the template one that looks inside.
//!
//! Invariant: if [`requirements`] gives an answer, two conversations that differ only in texts that meet the requirements
//! take the same way through the template. Variables are judged by name over the whole template, so a value
//! counts as tainted wherever it might be.

use std::collections::HashMap;

use minijinja::Value;
use minijinja::machinery::ast::{
    BinOpKind, Call, CallArg, CallType, CompareOpKind, Expr, Filter, GetAttr, Macro, Spanned, Stmt,
    UnaryOpKind,
};

/// Rounds until what is known of the variables no longer grows; each round can only taint more of them.
const ROUNDS_MAX: usize = 16;

/// What a text must be like to stand in for another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct TextRequirements {
    /// No white space at its ends.
    pub(super) trimmed: bool,
    /// Words that it must not contain.
    pub(super) without: Vec<String>,
    /// The prompt depends on the time.
    pub(super) time: bool,
}

impl TextRequirements {
    /// Whether a text must be read to know whether it meets them.
    pub(super) fn need_the_text(&self) -> bool {
        self.trimmed || !self.without.is_empty()
    }

    /// Both.
    pub(super) fn and(mut self, other: Self) -> Self {
        self.trimmed |= other.trimmed;
        self.time |= other.time;
        self.without.extend(other.without);
        self
    }
}

/// How much of a message's text is in a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Taint {
    /// Nothing.
    Clean,
    /// The text of a message, nothing before or after it.
    Content,
    /// A longer text with one in it.
    Joined,
    /// A list whose only item is the text.
    Pieces,
    /// A message.
    Message,
    /// A list of messages.
    Messages,
    /// A namespace with something of these in it; only its attributes may be used.
    Namespace,
}

/// The template looks inside, or does something that is not understood.
struct Inside;

type Judged<T> = Result<T, Inside>;

/// What the template of this tree asks of texts; `None` if it looks inside them.
pub(super) fn requirements(tree: &Stmt<'_>) -> Option<TextRequirements> {
    let mut judge = Judge::default();
    judge.known.insert("messages".to_owned(), Taint::Messages);
    for _ in 0..ROUNDS_MAX {
        judge.changed = false;
        judge.statement(tree).ok()?;
        if !judge.changed {
            return Some(judge.requirements);
        }
    }
    None
}

#[derive(Default)]
struct Judge {
    /// By name, or by `namespace.name`.
    known: HashMap<String, Taint>,
    /// The parameters of each macro, and whether it prints texts.
    macros: HashMap<String, (Vec<String>, Taint)>,
    requirements: TextRequirements,
    changed: bool,
}

impl Judge {
    fn get(&self, name: &str) -> Taint {
        self.known.get(name).copied().unwrap_or(Taint::Clean)
    }

    fn put(&mut self, name: &str, taint: Taint) -> Judged<()> {
        let before = self.get(name);
        let after = join(before, taint)?;
        if after != before {
            self.known.insert(name.to_owned(), after);
            self.changed = true;
        }
        Ok(())
    }

    /// Walks a list of statements; says what they print.
    fn statements(&mut self, list: &[Stmt<'_>]) -> Judged<Taint> {
        let mut printed = Taint::Clean;
        for statement in list {
            printed = printing(printed, self.statement(statement)?);
        }
        Ok(printed)
    }

    fn statement(&mut self, statement: &Stmt<'_>) -> Judged<Taint> {
        match statement {
            Stmt::Template(template) => self.statements(&template.children),
            Stmt::EmitRaw(_) | Stmt::Continue(_) | Stmt::Break(_) => Ok(Taint::Clean),
            Stmt::EmitExpr(emit) => match self.value(&emit.expr)? {
                Taint::Clean => Ok(Taint::Clean),
                Taint::Content | Taint::Joined => Ok(Taint::Joined),
                _ => Err(Inside),
            },
            Stmt::IfCond(cond) => {
                self.value(&cond.expr)?;
                let printed = self.statements(&cond.true_body)?;
                Ok(printing(printed, self.statements(&cond.false_body)?))
            }
            Stmt::ForLoop(each) => {
                let item = match self.value(&each.iter)? {
                    Taint::Clean => Taint::Clean,
                    Taint::Messages => Taint::Message,
                    _ => return Err(Inside),
                };
                if each.recursive {
                    return Err(Inside);
                }
                self.assign(&each.target, item)?;
                if let Some(filter) = &each.filter_expr {
                    self.value(filter)?;
                }
                let printed = self.statements(&each.body)?;
                Ok(printing(printed, self.statements(&each.else_body)?))
            }
            Stmt::Set(set) => {
                self.set(&set.target, &set.expr)?;
                Ok(Taint::Clean)
            }
            Stmt::WithBlock(with) => {
                for (target, value) in &with.assignments {
                    self.set(target, value)?;
                }
                self.statements(&with.body)
            }
            Stmt::SetBlock(set) => {
                let captured = self.statements(&set.body)?;
                if set.filter.is_some() && captured != Taint::Clean {
                    return Err(Inside);
                }
                self.assign(&set.target, captured)?;
                Ok(Taint::Clean)
            }
            Stmt::FilterBlock(block) => match self.statements(&block.body)? {
                Taint::Clean => Ok(Taint::Clean),
                _ => Err(Inside),
            },
            Stmt::Macro(declared) => self.declare(declared).map(|()| Taint::Clean),
            Stmt::Do(call) => self.call(&call.call).map(|_| Taint::Clean),
            _ => Err(Inside),
        }
    }

    fn declare(&mut self, declared: &Macro<'_>) -> Judged<()> {
        let name = |arg: &Expr<'_>| match arg {
            Expr::Var(var) => Ok(var.id.to_owned()),
            _ => Err(Inside),
        };
        let params = declared.args.iter().map(name).collect::<Judged<Vec<_>>>()?;
        for default in &declared.defaults {
            self.clean(default)?;
        }
        let printed = self.statements(&declared.body)?;
        let known = (params, printed);
        if self.macros.get(declared.name) != Some(&known) {
            self.macros.insert(declared.name.to_owned(), known);
            self.changed = true;
        }
        Ok(())
    }

    fn set(&mut self, target: &Expr<'_>, value: &Expr<'_>) -> Judged<()> {
        if let (Expr::Var(var), Expr::Call(call)) = (target, value)
            && let CallType::Function("namespace") = call.identify_call()
        {
            return self.new_namespace(var.id, &call.args);
        }
        let taint = self.value(value)?;
        self.assign(target, taint)
    }

    fn new_namespace(&mut self, name: &str, args: &[CallArg<'_>]) -> Judged<()> {
        // Known by this name alone: under another one, what is put into it would not be seen.
        self.put(name, Taint::Namespace)?;
        for arg in args {
            match arg {
                CallArg::Kwarg(key, value) => {
                    let taint = self.value(value)?;
                    self.put_attribute(name, key, taint)?;
                }
                CallArg::Pos(value) => self.clean(value)?,
                _ => return Err(Inside),
            }
        }
        Ok(())
    }

    fn put_attribute(&mut self, name: &str, attribute: &str, taint: Taint) -> Judged<()> {
        if taint != Taint::Clean {
            self.put(name, Taint::Namespace)?;
        }
        self.put(&format!("{name}.{attribute}"), taint)
    }

    fn assign(&mut self, target: &Expr<'_>, taint: Taint) -> Judged<()> {
        match target {
            Expr::Var(var) => self.put(var.id, taint),
            Expr::GetAttr(attr) => match &attr.expr {
                Expr::Var(var) => self.put_attribute(var.id, attr.name, taint),
                _ => Err(Inside),
            },
            // Several names at once.
            Expr::List(_) | Expr::Tuple(_) if taint == Taint::Clean => Ok(()),
            _ => Err(Inside),
        }
    }

    fn clean(&mut self, expr: &Expr<'_>) -> Judged<()> {
        match self.value(expr)? {
            Taint::Clean => Ok(()),
            _ => Err(Inside),
        }
    }

    fn all_clean<'e, 'a: 'e>(
        &mut self,
        list: impl IntoIterator<Item = &'e Expr<'a>>,
    ) -> Judged<()> {
        list.into_iter().try_for_each(|expr| self.clean(expr))
    }

    fn value(&mut self, expr: &Expr<'_>) -> Judged<Taint> {
        match expr {
            Expr::Const(_) => Ok(Taint::Clean),
            // Neighbours of a message hang on the loop: it may be asked for attributes only.
            Expr::Var(var) if var.id == "loop" => Err(Inside),
            Expr::Var(var) => match self.get(var.id) {
                Taint::Namespace => Err(Inside),
                taint => Ok(taint),
            },
            Expr::Slice(slice) => {
                self.all_clean(
                    [&slice.start, &slice.stop, &slice.step]
                        .into_iter()
                        .flatten(),
                )?;
                match self.value(&slice.expr)? {
                    whole @ (Taint::Clean | Taint::Messages) => Ok(whole),
                    _ => Err(Inside),
                }
            }
            Expr::UnaryOp(unary) => match (&unary.op, self.value(&unary.expr)?) {
                (UnaryOpKind::Not, _) | (_, Taint::Clean) => Ok(Taint::Clean),
                _ => Err(Inside),
            },
            Expr::BinOp(op) => self.operator(op.op, &op.left, &op.right),
            Expr::Compare(compare) => {
                let mut left = &compare.expr;
                for op in &compare.ops {
                    self.comparison(op.op, left, &op.expr)?;
                    left = &op.expr;
                }
                Ok(Taint::Clean)
            }
            Expr::IfExpr(cond) => {
                self.value(&cond.test_expr)?;
                let yes = self.value(&cond.true_expr)?;
                match &cond.false_expr {
                    Some(no) => join(yes, self.value(no)?),
                    None => Ok(yes),
                }
            }
            Expr::Filter(filter) => self.filter(filter),
            Expr::Test(test) => {
                let taint = self.value(&test.expr)?;
                let asks_kind = test.args.is_empty() && KIND_TESTS.contains(&test.name);
                self.clean_args(&test.args)?;
                match taint == Taint::Clean || asks_kind {
                    true => Ok(Taint::Clean),
                    false => Err(Inside),
                }
            }
            Expr::GetAttr(attr) => self.attribute(attr),
            Expr::GetItem(item) => {
                let key = constant(&item.subscript_expr);
                self.clean(&item.subscript_expr)?;
                match (
                    self.value(&item.expr)?,
                    key.as_ref().and_then(Value::as_str),
                ) {
                    (Taint::Clean, _) => Ok(Taint::Clean),
                    (Taint::Message, Some("content")) => Ok(Taint::Content),
                    (Taint::Message, Some(_)) => Ok(Taint::Clean),
                    (Taint::Messages, _) => Ok(Taint::Message),
                    (Taint::Pieces, _) => Ok(Taint::Content),
                    _ => Err(Inside),
                }
            }
            Expr::Call(call) => self.call(call),
            Expr::List(list) => self.all_clean(&list.items).map(|()| Taint::Clean),
            Expr::Tuple(tuple) => self.all_clean(&tuple.items).map(|()| Taint::Clean),
            Expr::Map(map) => {
                self.all_clean(&map.keys)?;
                self.all_clean(&map.values).map(|()| Taint::Clean)
            }
        }
    }

    fn attribute(&mut self, attr: &Spanned<GetAttr<'_>>) -> Judged<Taint> {
        if let Expr::Var(var) = &attr.expr {
            if self.get(var.id) == Taint::Namespace {
                return Ok(self.get(&format!("{}.{}", var.id, attr.name)));
            }
            if var.id == "loop" {
                let neighbour = ["previtem", "nextitem"].contains(&attr.name);
                return Ok(if neighbour {
                    Taint::Message
                } else {
                    Taint::Clean
                });
            }
        }
        match (self.value(&attr.expr)?, attr.name) {
            (Taint::Clean, _) => Ok(Taint::Clean),
            (Taint::Message, "content") => Ok(Taint::Content),
            (Taint::Message, _) => Ok(Taint::Clean),
            _ => Err(Inside),
        }
    }

    fn operator(&mut self, op: BinOpKind, left: &Expr<'_>, right: &Expr<'_>) -> Judged<Taint> {
        use Taint::{Clean, Content, Joined, Messages};
        let compared = match op {
            BinOpKind::Eq => Some(CompareOpKind::Eq),
            BinOpKind::Ne => Some(CompareOpKind::Ne),
            BinOpKind::In => Some(CompareOpKind::In),
            _ => None,
        };
        if let Some(op) = compared {
            return self.comparison(op, left, right).map(|()| Clean);
        }
        let (left, right) = (self.value(left)?, self.value(right)?);
        match (op, left, right) {
            (_, Clean, Clean) => Ok(Clean),
            (BinOpKind::ScAnd | BinOpKind::ScOr, ..) => join(left, right),
            (
                BinOpKind::Add | BinOpKind::Concat,
                Clean | Content | Joined,
                Clean | Content | Joined,
            ) => Ok(Joined),
            (BinOpKind::Add, Messages, Messages | Clean) | (BinOpKind::Add, Clean, Messages) => {
                Ok(Messages)
            }
            _ => Err(Inside),
        }
    }

    fn comparison(&mut self, op: CompareOpKind, left: &Expr<'_>, right: &Expr<'_>) -> Judged<()> {
        use Taint::{Clean, Content, Message, Messages};
        let sides = (self.value(left)?, self.value(right)?);
        match (op, sides) {
            (_, (Clean, Clean)) => Ok(()),
            // Nothing and the empty text are no stand-ins.
            (CompareOpKind::Eq | CompareOpKind::Ne, (Content, Clean)) if is_nothing(right) => {
                Ok(())
            }
            (CompareOpKind::Eq | CompareOpKind::Ne, (Clean, Content)) if is_nothing(left) => Ok(()),
            (CompareOpKind::In | CompareOpKind::NotIn, (Clean, Content)) => {
                self.forbid(constant(left).as_ref())
            }
            // Which fields a message has.
            (CompareOpKind::In | CompareOpKind::NotIn, (Clean, Message | Messages)) => {
                constant(left).map(|_| ()).ok_or(Inside)
            }
            _ => Err(Inside),
        }
    }

    /// Texts must not contain `word`.
    fn forbid(&mut self, word: Option<&Value>) -> Judged<()> {
        let word = word.and_then(Value::as_str).ok_or(Inside)?;
        if word.is_empty() || word.contains(super::shapes::is_mark) {
            return Err(Inside);
        }
        if !self.requirements.without.iter().any(|known| known == word) {
            self.requirements.without.push(word.to_owned());
        }
        Ok(())
    }

    fn filter(&mut self, filter: &Spanned<Filter<'_>>) -> Judged<Taint> {
        use Taint::{Clean, Content, Joined, Message, Messages};
        self.clean_args(&filter.args)?;
        let Some(expr) = &filter.expr else {
            return Err(Inside);
        };
        let plain = filter.args.is_empty();
        match (filter.name, self.value(expr)?) {
            (_, Clean) => Ok(Clean),
            ("trim", text @ (Content | Joined)) if plain => {
                self.requirements.trimmed = true;
                Ok(text)
            }
            ("string", text @ (Content | Joined)) if plain => Ok(text),
            ("default" | "d", text @ (Content | Joined)) => Ok(text),
            ("length" | "count", Messages | Message) if plain => Ok(Clean),
            ("list" | "reverse", Messages) if plain => Ok(Messages),
            ("first" | "last", Messages) if plain => Ok(Message),
            ("selectattr" | "rejectattr", Messages) => match filter.args.first() {
                Some(CallArg::Pos(key)) if is_other_field(constant(key).as_ref()) => Ok(Messages),
                _ => Err(Inside),
            },
            _ => Err(Inside),
        }
    }

    fn clean_args(&mut self, args: &[CallArg<'_>]) -> Judged<()> {
        args.iter().try_for_each(|arg| match arg {
            CallArg::Pos(value) | CallArg::Kwarg(_, value) => self.clean(value),
            CallArg::PosSplat(_) | CallArg::KwargSplat(_) => Err(Inside),
        })
    }

    fn call(&mut self, call: &Spanned<Call<'_>>) -> Judged<Taint> {
        match call.identify_call() {
            CallType::Function(name) if self.macros.contains_key(name) => {
                self.call_macro(name, &call.args)
            }
            CallType::Function("raise_exception") => {
                // What is raised is found out again with the texts themselves.
                for arg in &call.args {
                    if let CallArg::Pos(value) = arg {
                        self.value(value)?;
                    }
                }
                Ok(Taint::Clean)
            }
            CallType::Function(name @ ("range" | "strftime_now" | "namespace" | "dict")) => {
                self.requirements.time |= name == "strftime_now";
                self.clean_args(&call.args).map(|()| Taint::Clean)
            }
            CallType::Method(on, name) => self.method(on, name, &call.args),
            _ => Err(Inside),
        }
    }

    fn call_macro(&mut self, name: &str, args: &[CallArg<'_>]) -> Judged<Taint> {
        let (params, printed) = self.macros.get(name).cloned().ok_or(Inside)?;
        let mut names = params.iter();
        for arg in args {
            let (param, value) = match arg {
                CallArg::Pos(value) => (names.next().ok_or(Inside)?.as_str(), value),
                CallArg::Kwarg(key, value) => (*key, value),
                CallArg::PosSplat(_) | CallArg::KwargSplat(_) => return Err(Inside),
            };
            let taint = self.value(value)?;
            self.put(param, taint)?;
        }
        Ok(printed)
    }

    fn method(&mut self, on: &Expr<'_>, name: &str, args: &[CallArg<'_>]) -> Judged<Taint> {
        use Taint::{Clean, Content, Joined, Message, Pieces};
        self.clean_args(args)?;
        let first = match args {
            [] => None,
            [CallArg::Pos(only), ..] => constant(only),
            _ => return Err(Inside),
        };
        match (name, self.value(on)?) {
            (_, Clean) => Ok(Clean),
            ("strip" | "lstrip" | "rstrip", text @ (Content | Joined)) => {
                let set = first.as_ref().and_then(Value::as_str);
                let blank = |set: &str| set.chars().all(char::is_whitespace);
                if !args.is_empty() && !set.is_some_and(blank) {
                    return Err(Inside);
                }
                self.requirements.trimmed = true;
                Ok(text)
            }
            ("startswith" | "endswith", Content) if args.len() == 1 => {
                self.forbid(first.as_ref()).map(|()| Clean)
            }
            ("split", Content) if args.len() == 1 => self.forbid(first.as_ref()).map(|()| Pieces),
            ("get", Message) => match first.as_ref().and_then(Value::as_str) {
                Some("content") => Ok(Content),
                Some(_) => Ok(Clean),
                None => Err(Inside),
            },
            _ => Err(Inside),
        }
    }
}

/// Tests that ask what kind of value this is: all texts that are not empty answer alike.
const KIND_TESTS: [&str; 9] = [
    "defined",
    "undefined",
    "none",
    "string",
    "mapping",
    "iterable",
    "sequence",
    "number",
    "boolean",
];

fn constant(expr: &Expr<'_>) -> Option<Value> {
    expr.as_const()
}

fn is_nothing(expr: &Expr<'_>) -> bool {
    constant(expr).is_some_and(|value| value.is_none() || value.as_str() == Some(""))
}

fn is_other_field(key: Option<&Value>) -> bool {
    let key = key.and_then(Value::as_str);
    key.is_some_and(|key| !key.contains('.') && key != "content")
}

/// A value that is one or the other.
fn join(one: Taint, other: Taint) -> Judged<Taint> {
    use Taint::{Clean, Content, Joined};
    match (one, other) {
        _ if one == other => Ok(one),
        (Clean, tainted) | (tainted, Clean) => Ok(tainted),
        (Content, Joined) | (Joined, Content) => Ok(Joined),
        _ => Err(Inside),
    }
}

fn printing(one: Taint, other: Taint) -> Taint {
    match (one, other) {
        (Taint::Clean, Taint::Clean) => Taint::Clean,
        _ => Taint::Joined,
    }
}

#[cfg(test)]
mod tests;
