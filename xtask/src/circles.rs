//! Finds circles of files (dependency cycles): of two sibling modules, at most one may use the other.
//!
//! A module *uses* another when its code names an item that the other defines, by `use` or by path, through any number
//! of re-exports. Declaring a module does not count as a use, nor does re-exporting its items (`pub use`). Tests
//! (`#[cfg(test)]`) and method calls do not count either. A module includes everything inside it: if `pool/choose.rs`
//! uses `sync`, then `pool` uses `sync`. Code inside a module may use what the module itself defines.
//!
//! A *circle* is a set of modules inside one parent module in which each module reaches every other through uses.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::mem;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use proc_macro2::{TokenStream, TokenTree};
use serde_json::Value;
use syn::visit::{self, Visit};

use crate::{run, workspace};

/// Reports every circle in one error; returns the number of files checked.
pub(crate) fn check() -> Result<usize> {
    let metadata = run::output(run::cargo().args(["metadata", "--no-deps", "--format-version", "1"]))?;
    let metadata: Value = serde_json::from_str(&metadata)?;
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let targets = packages.flat_map(|package| package["targets"].as_array().into_iter().flatten());
    let roots: BTreeSet<&Path> =
        targets.filter_map(|target| Some(Path::new(target["src_path"].as_str()?))).collect();

    let mut checked = 0;
    let mut circles = Vec::new();
    for root in roots {
        let sources = Sources::read(root)?;
        checked += sources.files.len();
        circles.extend(sources.circles());
    }
    if !circles.is_empty() {
        bail!("files that use each other (xtask/src/circles.rs says what counts):\n{}", circles.join("\n"));
    }
    Ok(checked)
}

/// The files of one crate.
#[derive(Default)]
struct Sources {
    files: Vec<PathBuf>,
    /// The first is the crate's root.
    modules: Vec<Module>,
}

#[derive(Default)]
struct Module {
    file: usize,
    parent: usize,
    children: BTreeMap<String, usize>,
    /// Names of the items defined here.
    items: BTreeSet<String>,
    /// The path that each imported name refers to.
    imports: BTreeMap<String, Names>,
    globs: Vec<Names>,
    /// Every path in the code, except those in `pub use`.
    named: BTreeSet<Names>,
}

/// The segments of a path.
type Names = Vec<String>;

/// A use of one name, reduced to the two sibling modules `from` and `to`.
struct Use {
    from: usize,
    to: usize,
    /// The file that contains the name, and the file that defines it.
    files: (usize, usize),
    name: String,
}

impl Sources {
    fn read(root: &Path) -> Result<Self> {
        let mut sources = Self::default();
        let folder = root.parent().context("a file without a folder")?;
        sources.read_file(root, folder, 0)?;
        Ok(sources)
    }

    /// Reads a file and its children (in `folder`) as a module; returns its number.
    fn read_file(&mut self, file: &Path, folder: &Path, parent: usize) -> Result<usize> {
        let text = fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
        let parsed = syn::parse_file(&text).with_context(|| format!("parsing {}", file.display()))?;
        self.files.push(file.to_owned());
        self.read_module(&parsed.items, self.files.len() - 1, folder, parent)
    }

    fn read_module(
        &mut self,
        items: &[syn::Item],
        file: usize,
        folder: &Path,
        parent: usize,
    ) -> Result<usize> {
        let number = self.modules.len();
        self.modules.push(Module::default());
        let mut module = Module { file, parent, ..Module::default() };
        for item in items {
            module.visit_item(item);
            module.items.extend(defined(item).map(ToString::to_string));
            let syn::Item::Mod(child) = item else { continue };
            if is_test(&child.attrs) {
                continue;
            }
            let name = child.ident.to_string();
            let below = folder.join(&name);
            let child = match &child.content {
                Some((_, items)) => self.read_module(items, file, &below, number)?,
                None if let Some(path) = elsewhere(&child.attrs) => {
                    let path = self.files[file].parent().context("a file without a folder")?.join(path);
                    let below = path.parent().context("a file without a folder")?.to_owned();
                    self.read_file(&path, &below, number)?
                }
                None => {
                    let beside = folder.join(format!("{name}.rs"));
                    let path = if beside.exists() { beside } else { below.join("mod.rs") };
                    self.read_file(&path, &below, number)?
                }
            };
            module.children.insert(name, child);
        }
        self.modules[number] = module;
        Ok(number)
    }

    /// The module that defines `path` (as written in `module`), and the item's name. `None` if that is another crate,
    /// or if the path does not name an item.
    fn resolve(&self, module: usize, path: &[String], steps: u8) -> Option<(usize, String)> {
        // Re-exports can form a loop.
        let steps = steps.checked_sub(1)?;
        let (name, rest) = path.split_first()?;
        let here = &self.modules[module];
        match name.as_str() {
            "crate" => return self.resolve(0, rest, steps),
            "self" => return self.resolve(module, rest, steps),
            "super" => return self.resolve(here.parent, rest, steps),
            _ => {}
        }
        if let Some(child) = here.children.get(name)
            && !rest.is_empty()
        {
            return self.resolve(*child, rest, steps);
        }
        if here.items.contains(name) {
            return Some((module, name.clone()));
        }
        if let Some(import) = here.imports.get(name) {
            return self.resolve(module, &[import, rest].concat(), steps);
        }
        here.globs.iter().find_map(|glob| self.resolve(module, &[glob, path].concat(), steps))
    }

    /// The modules from the root down to `module`.
    fn lineage(&self, module: usize) -> Vec<usize> {
        let mut lineage = if module == 0 { Vec::new() } else { self.lineage(self.modules[module].parent) };
        lineage.push(module);
        lineage
    }

    fn uses(&self) -> Vec<Use> {
        let mut uses = Vec::new();
        for (number, module) in self.modules.iter().enumerate() {
            for path in &module.named {
                let Some((definer, name)) = self.resolve(number, path, MAX_STEPS) else { continue };
                let files = (module.file, self.modules[definer].file);
                let mut side_by_side = self.lineage(number).into_iter().zip(self.lineage(definer));
                // A module and its own parent are not siblings.
                if let Some((from, to)) = side_by_side.find(|(from, to)| from != to) {
                    uses.push(Use { from, to, files, name });
                }
            }
        }
        uses
    }

    /// Each circle as text, with one line for each file that uses another.
    fn circles(&self) -> Vec<String> {
        let uses = self.uses();
        let mut used_by: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
        uses.iter().for_each(|one| _ = used_by.entry(one.from).or_default().insert(one.to));
        let reached = |from| {
            let mut reached = BTreeSet::new();
            let mut next = vec![from];
            while let Some(module) = next.pop() {
                let used = used_by.get(&module).into_iter().flatten();
                next.extend(used.filter(|module| reached.insert(**module)));
            }
            reached
        };
        let reaches: Vec<BTreeSet<usize>> = (0..self.modules.len()).map(reached).collect();
        let circle_of = |module: usize| -> BTreeSet<usize> {
            reaches[module].iter().copied().filter(|other| reaches[*other].contains(&module)).collect()
        };
        let circles: BTreeSet<BTreeSet<usize>> = (0..self.modules.len()).map(circle_of).collect();
        circles
            .iter()
            .filter(|circle| !circle.is_empty())
            .map(|circle| self.describe(circle, &uses))
            .collect()
    }

    fn describe(&self, circle: &BTreeSet<usize>, uses: &[Use]) -> String {
        let mut names: BTreeMap<(usize, usize), BTreeSet<&str>> = BTreeMap::new();
        for one in uses.iter().filter(|one| circle.contains(&one.from) && circle.contains(&one.to)) {
            names.entry(one.files).or_default().insert(&one.name);
        }
        let mut text = format!("a circle of {} files:", circle.len());
        for ((from, to), names) in names {
            let names: Vec<&str> = names.into_iter().collect();
            text += &format!("\n  {} uses {}: {}", self.name(from), self.name(to), names.join(", "));
        }
        text
    }

    fn name(&self, file: usize) -> String {
        let path = &self.files[file];
        path.strip_prefix(workspace::root()).unwrap_or(path).display().to_string()
    }
}

/// Maximum number of steps to resolve a path; more than any path in this workspace needs.
const MAX_STEPS: u8 = 16;

impl Module {
    fn import(&mut self, tree: &syn::UseTree, mut path: Names, is_use: bool) {
        match tree {
            syn::UseTree::Path(tree) => {
                path.push(tree.ident.to_string());
                self.import(&tree.tree, path, is_use);
            }
            syn::UseTree::Group(group) => {
                group.items.iter().for_each(|tree| self.import(tree, path.clone(), is_use));
            }
            syn::UseTree::Glob(_) => self.globs.push(path),
            syn::UseTree::Name(syn::UseName { ident }) => self.import_name(ident, ident, path, is_use),
            syn::UseTree::Rename(tree) => self.import_name(&tree.ident, &tree.rename, path, is_use),
        }
    }

    fn import_name(&mut self, ident: &syn::Ident, name: &syn::Ident, mut path: Names, is_use: bool) {
        if ident != "self" {
            path.push(ident.to_string());
        }
        if is_use {
            self.named.insert(path.clone());
        }
        let name = if name == "self" { path.last().cloned().unwrap_or_default() } else { name.to_string() };
        self.imports.insert(name, path);
    }

    /// The parser treats a macro's arguments as tokens.
    fn read_tokens(&mut self, tokens: TokenStream) {
        let mut path = Names::new();
        let mut between = String::new();
        for token in tokens {
            match token {
                TokenTree::Ident(name) => {
                    if between != "::" {
                        self.named.insert(mem::take(&mut path));
                    }
                    // A name after a dot is a field or a method.
                    if between != "." {
                        path.push(name.to_string());
                    }
                    between.clear();
                }
                TokenTree::Punct(punct) => between.push(punct.as_char()),
                TokenTree::Group(group) => {
                    between.push(' ');
                    self.read_tokens(group.stream());
                }
                TokenTree::Literal(_) => between.push(' '),
            }
        }
        self.named.insert(path);
    }
}

impl<'ast> Visit<'ast> for Module {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        if !is_test(attributes(item)) && !matches!(item, syn::Item::Mod(_)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        let re_exports = !matches!(item.vis, syn::Visibility::Inherited);
        self.import(&item.tree, Names::new(), !re_exports);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.named.insert(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.visit_path(&call.path);
        self.read_tokens(call.tokens.clone());
    }
}

fn attributes(item: &syn::Item) -> &[syn::Attribute] {
    match item {
        syn::Item::Const(item) => &item.attrs,
        syn::Item::Enum(item) => &item.attrs,
        syn::Item::Fn(item) => &item.attrs,
        syn::Item::Impl(item) => &item.attrs,
        syn::Item::Mod(item) => &item.attrs,
        syn::Item::Static(item) => &item.attrs,
        syn::Item::Struct(item) => &item.attrs,
        syn::Item::Trait(item) => &item.attrs,
        syn::Item::Type(item) => &item.attrs,
        syn::Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// The name that an item defines, unless it is a module.
fn defined(item: &syn::Item) -> Option<&syn::Ident> {
    Some(match item {
        syn::Item::Const(item) => &item.ident,
        syn::Item::Enum(item) => &item.ident,
        syn::Item::Fn(item) => &item.sig.ident,
        syn::Item::Macro(item) => item.ident.as_ref()?,
        syn::Item::Static(item) => &item.ident,
        syn::Item::Struct(item) => &item.ident,
        syn::Item::Trait(item) => &item.ident,
        syn::Item::Type(item) => &item.ident,
        syn::Item::Union(item) => &item.ident,
        _ => return None,
    })
}

fn is_test(attributes: &[syn::Attribute]) -> bool {
    let tests = |attribute: &syn::Attribute| {
        attribute.path().is_ident("cfg")
            && attribute.parse_args::<syn::Path>().is_ok_and(|path| path.is_ident("test"))
    };
    attributes.iter().any(tests)
}

/// The value of `#[path = "..."]`.
fn elsewhere(attributes: &[syn::Attribute]) -> Option<String> {
    attributes.iter().filter(|attribute| attribute.path().is_ident("path")).find_map(|attribute| {
        let syn::Meta::NameValue(pair) = &attribute.meta else { return None };
        let syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(path), .. }) = &pair.value else { return None };
        Some(path.value())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The circles of a crate made of these files.
    fn circles(files: &[(&str, &str)]) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let sources = Sources::read(&folder.path().join("lib.rs")).unwrap();
        assert_eq!(sources.files.len(), files.len());
        let prefix = format!("{}/", folder.path().display());
        sources.circles().iter().map(|circle| circle.replace(&prefix, "")).collect()
    }

    #[test]
    fn files_that_use_each_other_are_named_with_what_they_use() {
        let found = circles(&[
            ("lib.rs", "mod a; mod b; mod c;"),
            ("a.rs", "use crate::b::B; use crate::c::C; pub struct A(B, C);"),
            ("b.rs", "use super::a; pub struct B; fn f(_: &a::A) {}"),
            ("c.rs", "pub struct C;"),
        ]);
        assert_eq!(found, ["a circle of 2 files:\n  a.rs uses b.rs: B\n  b.rs uses a.rs: A"]);
    }

    #[test]
    fn the_path_attribute_of_a_module_is_followed() {
        let found = circles(&[
            ("lib.rs", "#[path = \"shared/mod.rs\"] mod a; mod b;"),
            ("shared/mod.rs", "mod deep; pub fn a() { crate::b::b() }"),
            ("shared/deep.rs", ""),
            ("b.rs", "pub fn b() { crate::a::a() }"),
        ]);
        assert_eq!(
            found,
            ["a circle of 2 files:\n  shared/mod.rs uses b.rs: b\n  b.rs uses shared/mod.rs: a"]
        );
    }

    #[test]
    fn a_circle_may_be_long_and_there_may_be_two() {
        let found = circles(&[
            ("lib.rs", "mod a; mod b; mod c; mod d; mod e;"),
            ("a.rs", "pub fn a() { crate::b::b() }"),
            ("b.rs", "pub fn b() { crate::c::c() }"),
            ("c.rs", "pub fn c() { crate::a::a() }"),
            ("d.rs", "pub fn d() { crate::a::a(); crate::e::e() }"),
            ("e.rs", "pub fn e() { crate::d::d() }"),
        ]);
        let first_lines: Vec<&str> = found.iter().filter_map(|circle| circle.lines().next()).collect();
        assert_eq!(first_lines, ["a circle of 3 files:", "a circle of 2 files:"]);
    }

    #[test]
    fn a_module_includes_its_children_and_they_may_use_it() {
        let parts = |left, right| {
            circles(&[
                ("lib.rs", "mod pool; mod sync;"),
                (
                    "pool.rs",
                    "mod left; mod right; pub use left::*; pub(crate) use self::right::Right; pub struct Own;",
                ),
                ("pool/left.rs", left),
                ("pool/right.rs", right),
                ("sync.rs", "use crate::pool::Right; pub struct Sync(Right);"),
            ])
        };
        let right = "pub struct Right(super::Own);";
        assert!(parts("use super::Right; pub struct Left(Right);", right).is_empty());
        assert_eq!(
            parts("use crate::sync::Sync; pub struct Left(Sync);", right),
            ["a circle of 2 files:\n  pool/left.rs uses sync.rs: Sync\n  sync.rs uses pool/right.rs: Right"]
        );
        assert_eq!(
            parts("use super::Right; pub struct Left(Right);", "pub struct Right(Box<crate::pool::Left>);"),
            [
                "a circle of 2 files:\n  pool/left.rs uses pool/right.rs: Right\n  pool/right.rs uses pool/left.rs: Left"
            ]
        );
    }

    #[test]
    fn macro_arguments_count_but_tests_methods_and_other_crates_do_not() {
        let files = |of_b| {
            [
                ("lib.rs", "mod a; mod b;"),
                ("a.rs", "use crate::b::B; pub fn a(b: B) -> u8 { b.a() + b.a::<u8>() }"),
                ("b.rs", of_b),
            ]
        };
        for clean in [
            "pub struct B; #[cfg(test)] mod tests { use crate::a::a; }",
            "pub struct B; #[cfg(test)] use crate::a::a;",
            "pub struct B; use std::mem as a; fn f(b: B) { println!(\"{}{}\", b.a(), a::size_of::<B>()) }",
        ] {
            assert!(circles(&files(clean)).is_empty(), "{clean}");
        }
        for circle in [
            "use crate::*; pub struct B; fn f() { a::a() }",
            "pub struct B; fn f() { println!(\"{}\", crate::a::a(B)) }",
            "pub struct B; mod within { use super::super::a::a; }",
            "pub struct B; #[cfg(unix)] fn f() { use crate::a::a as other; }",
        ] {
            assert_eq!(circles(&files(circle)).len(), 1, "{circle}");
        }
    }
}
