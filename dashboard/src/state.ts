// What does the page know? All that the stream told, bounded as the stream bounds it.

import { planeHost, workerName } from "./format.js";

/** One step of traffic, by column; `null` where nothing was measured. */
export type TrafficRow = readonly (number | null)[];

export interface Totals {
  readonly started: number;
  readonly succeeded: number;
  readonly failed: number;
  readonly rejected: number;
  readonly cancelled: number;
  readonly output_tokens: number;
  readonly active: number;
  readonly waiting: number;
  readonly held: number;
}

export interface Traffic {
  readonly step: TrafficRow;
  readonly minute: TrafficRow;
  readonly totals: Totals;
}

export interface CacheState {
  readonly state: string;
  readonly cause: string | null;
  readonly advice: string | null;
  readonly credit: number;
  readonly last_fault: string | null;
  readonly connected: boolean | null;
  readonly recovering: string | null;
  readonly lag_ms: number | null;
}

export interface RankRow {
  readonly key: string;
  readonly worker: string;
  readonly rank: number;
  readonly ranks: number;
  readonly models: readonly string[];
  /** `aggregated`, or the part of requests that it computes: `prefill` or `decode`. */
  readonly role: string;
  readonly url: string | null;
  /** Where a worker of the request plane is. */
  readonly address: string | null;
  readonly state: string;
  readonly removable: boolean;
  readonly requests: number;
  readonly prefill_tokens: number;
  readonly decode_blocks: number;
  readonly kv_blocks: number | null;
  readonly batch_tokens: number | null;
  readonly cache: CacheState | null;
  /** Answers compared, and tokens of their prompts: all, predicted as cached, reported as cached. */
  readonly hits: readonly [number, number, number, number];
}

export interface Outcome {
  readonly client_request_id: string | null;
  readonly status: number;
  readonly moves: number;
  readonly prompt_tokens: number | null;
  readonly predicted_cached_tokens: number | null;
  readonly reported_cached_tokens: number | null;
  readonly output_tokens: number | null;
  readonly ttft_ms: number | null;
  readonly total_ms: number;
}

export interface DecisionRow {
  readonly id: string;
  readonly at: number;
  readonly model: string;
  /** `prefill` where the worker computes the prompt for another. */
  readonly role: string | null;
  readonly worker: string | null;
  readonly reason: string | null;
  /** The part of the cost by which the winner won. */
  readonly deciding: string | null;
  readonly cost: number | null;
  readonly runner_up: number | null;
  readonly seconds: boolean;
  readonly tokens: number;
  readonly blocks: number;
  readonly cached_blocks: number | null;
  readonly predicted: number;
  readonly eligible: number;
  readonly excluded: number;
  readonly queued_ms: number;
  readonly failed_before: number;
  readonly resumed: boolean;
  readonly error: string | null;
  outcome: Outcome | null;
  /** Another worker was asked after this one. */
  superseded?: boolean;
  /** The prompt came from a prefill worker, which has a row of its own. */
  prefilled?: boolean;
}

export interface Weights {
  readonly overlap_score_credit: number;
  readonly overlap_score_credit_decay: number;
  readonly prefill_load_scale: number;
  readonly decode_active_request_weight: number;
}

export interface Thresholds {
  readonly active_decode_blocks_threshold: number | null;
  readonly active_prefill_tokens_threshold: number | null;
  readonly active_prefill_tokens_threshold_frac: number | null;
}

export interface ModelRow {
  readonly name: string;
  readonly router: string;
  readonly mode: string;
  readonly policy: string;
  readonly block_size: number;
  readonly context_length: number;
  readonly tokens_from: string;
  readonly workers: number;
  readonly prefill_workers: number;
  readonly sessions: number;
  readonly held: number;
  readonly weights: Weights;
  readonly thresholds: Thresholds;
}

interface Changes {
  readonly at: number;
  readonly draining: boolean;
  readonly traffic: Record<string, Traffic> | null;
  readonly fleet: readonly RankRow[];
  readonly left_out: number;
  readonly models?: readonly ModelRow[];
  readonly decisions: readonly DecisionRow[];
}

export interface Tick extends Changes {
  readonly gone: readonly string[];
  readonly skipped: number;
  readonly ended: readonly { readonly id: string; readonly outcome: Outcome }[];
}

export interface Hello extends Changes {
  readonly version: string;
  readonly started: number;
  readonly tick_ms: number;
  readonly step_ms: number;
  readonly steps: number;
  readonly columns: readonly string[];
  readonly can_act: boolean;
  readonly models: readonly ModelRow[];
  readonly history: Record<string, readonly TrafficRow[]>;
}

/** Decisions that the page keeps. */
const DECISIONS_MAX = 300;

export class State {
  version = "";
  started = 0;
  at = 0;
  stepMs = 5000;
  steps = 180;
  canAct = false;
  draining = false;
  ready = false;
  leftOut = 0;
  /** Decisions that were made and not listed, in the last second. */
  skipped = 0;
  /** Model that is looked at; empty for all. */
  scope = "";
  models: readonly ModelRow[] = [];
  readonly fleet = new Map<string, RankRow>();
  /** The same by their names in decisions (`7/0`). */
  private readonly byName = new Map<string, RankRow>();
  /** Newest first. */
  decisions: DecisionRow[] = [];
  private columns: readonly string[] = [];
  private history = new Map<string, TrafficRow[]>();
  private latest: Record<string, Traffic> = {};

  hello(told: Hello): void {
    this.version = told.version;
    this.started = told.started;
    this.stepMs = told.step_ms;
    this.steps = told.steps;
    this.canAct = told.can_act;
    this.columns = told.columns;
    this.fleet.clear();
    this.byName.clear();
    this.decisions = [];
    this.history = new Map(Object.entries(told.history).map(([scope, rows]) => [scope, [...rows]]));
    this.skipped = 0;
    this.ready = true;
    this.change(told);
  }

  tick(told: Tick): void {
    for (const key of told.gone) {
      const row = this.fleet.get(key);
      if (row !== undefined) this.byName.delete(`${row.worker}/${row.rank}`);
      this.fleet.delete(key);
    }
    this.skipped = told.skipped;
    this.change(told);
    if (told.ended.length > 0) {
      const ended = new Map(told.ended.map((one) => [one.id, one.outcome]));
      for (const row of this.decisions) if (!row.superseded) row.outcome ??= ended.get(row.id) ?? null;
    }
  }

  private change(told: Changes): void {
    this.at = told.at;
    this.draining = told.draining;
    this.leftOut = told.left_out;
    for (const row of told.fleet) {
      this.fleet.set(row.key, row);
      this.byName.set(`${row.worker}/${row.rank}`, row);
    }
    if (told.models !== undefined) this.models = told.models;
    if (told.decisions.length > 0) {
      const newest = [...told.decisions].reverse();
      this.decisions = [...newest, ...this.decisions].slice(0, DECISIONS_MAX);
      relate(this.decisions);
    }
    if (told.traffic !== null) {
      this.latest = told.traffic;
      for (const [scope, traffic] of Object.entries(told.traffic)) this.addStep(scope, traffic.step);
    }
  }

  private addStep(scope: string, step: TrafficRow): void {
    const rows = this.history.get(scope) ?? [];
    if (rows.at(-1)?.[0] === step[0]) rows.pop();
    rows.push(step);
    if (rows.length > this.steps) rows.shift();
    this.history.set(scope, rows);
  }

  /** The steps of what is looked at, oldest first. */
  rows(): readonly TrafficRow[] {
    return this.history.get(this.scope) ?? [];
  }

  column(name: string): number {
    return this.columns.indexOf(name);
  }

  traffic(scope = this.scope): Traffic | null {
    return this.latest[scope] ?? null;
  }

  /** A figure of the last minute. */
  minute(name: string): number | null {
    return this.traffic()?.minute[this.column(name)] ?? null;
  }

  /** Ranks of what is looked at. */
  ranks(): RankRow[] {
    const all = [...this.fleet.values()];
    return this.scope === "" ? all : all.filter((row) => row.models.includes(this.scope));
  }

  /** How people call a worker's rank, by its name in decisions (`7/0`); its address where it is known from elsewhere. */
  nameOf(worker: string, url: string | null = null): string {
    const row = this.byName.get(worker);
    return row === undefined ? workerName(worker, url) : rankName(row);
  }
}

/** How people call a rank. */
export function rankName(row: RankRow): string {
  const name = workerName(row.worker, row.url ?? planeHost(row.address));
  return row.ranks > 1 ? `${name} rank ${row.rank}` : name;
}

/** Marks those that a later worker took over, and those whose prompt another worker computed. Newest first. */
function relate(rows: readonly DecisionRow[]): void {
  const seen = new Set<string>();
  const prefills = new Set<string>();
  for (const row of rows) {
    const leg = `${row.id} ${row.role ?? ""}`;
    if (seen.has(leg)) row.superseded = true;
    seen.add(leg);
    if (row.role !== null) prefills.add(row.id);
  }
  for (const row of rows) if (row.role === null && prefills.has(row.id)) row.prefilled = true;
}

/** A view of the page. */
export interface View {
  readonly root: HTMLElement;
  update(state: State): void;
  leave?(): void;
}
